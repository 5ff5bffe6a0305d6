"""Nothing private gets into what is stored or shown."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.scrub import Scrubber, allowed_env, run_env

ENVIRON = {
    "HOME": "/home/jdoe",
    "USER": "jdoe",
    "HOSTNAME": "gpu-node-17.cluster.example",
    "HF_TOKEN": "hunter2hunter2",
    "WANDB_API_KEY": "abcdef0123456789",
    "CUDA_VISIBLE_DEVICES": "0",
    "MY_SETTING": "plain",
    "NVTE_DEBUG": "1",
    "PATH": "/usr/bin",
}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("File /home/jdoe/work/x.py", "File ~/work/x.py"),
        ("File /home/other/x.py", "File ~/x.py"),
        ("File /Users/someone/x.py", "File ~/x.py"),
        ("jdoe@gpu-node-17: /scratch/jdoe/x", "<user>@<host>: /scratch/<user>/x"),
        ("the control of jdoe", "the control of jdoe"),
        ("gpu-node-17.cluster.example", "<host>"),
        ("token is hunter2hunter2!", "token is <secret>!"),
        ("key abcdef0123456789", "key <secret>"),
        ("ghp_" + "a" * 36, "<secret>"),
        ("hf_" + "B" * 34, "<secret>"),
        ("AKIA" + "A1" * 8, "<secret>"),
        ("https://me:pass@index.example/simple", "https://<secret>@index.example/simple"),
        ("Authorization: Bearer abc.def-ghi_jkl", "Authorization: Bearer <secret>"),
        ("/cells/a/overlay/pkg/m.py", "<overlay>/pkg/m.py"),
        ("/cells/a/x", "<cell>/x"),
        ("/cells/ab/x", "/cells/ab/x"),
        ("jdoes and xjdoe", "jdoes and xjdoe"),
    ],
)
def test_planted(text, clean):
    scrub = Scrubber([("<overlay>", Path("/cells/a/overlay")), ("<cell>", Path("/cells/a"))], ENVIRON)
    assert scrub(text) == clean


def test_the_environment_that_is_recorded_and_the_one_that_is_passed_on():
    assert allowed_env(ENVIRON) == {"CUDA_VISIBLE_DEVICES": "0", "NVTE_DEBUG": "1"}
    assert set(run_env(ENVIRON)) == {"CUDA_VISIBLE_DEVICES", "NVTE_DEBUG", "PATH"}
    multicast_off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    assert run_env(multicast_off) == multicast_off


@given(st.text(), st.text())
def test_a_secret_is_gone_wherever_it_stands_and_a_second_pass_changes_nothing(before, after):
    scrub = Scrubber([], ENVIRON)
    once = scrub(f"{before}hunter2hunter2{after}")
    assert "hunter2hunter2" not in once
    assert scrub(once) == once


def test_the_first_name_of_a_folder_holds():
    scrub = Scrubber([("<release>", Path("/env/site")), ("<base>", Path("/env/site")), ("<base>", Path("/base/site"))], ENVIRON)
    assert scrub("/env/site/a /base/site/b") == "<release>/a <base>/b"
