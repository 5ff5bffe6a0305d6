"""Pack 03 on real releases: breaking its fix or its trigger turns it red, the audit tells what a function does, and its README is what the receipts say."""

import pytest
from helpers import installed, run_script
from packaging.version import Version

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack03")
FUNCTIONS = """\
import torch

def scores(q, k):
    return q @ k.transpose(0, 1)

def pointer(x):
    return x.contiguous().data_ptr()

def exported(x):
    return torch.from_dlpack(x.__dlpack__())

def routed(x):
    return x._data.view(torch.float8_e4m3fn)

def raises(x):
    raise ValueError("not that shape")
"""


@pytest.fixture(scope="module")
def release():
    return installed(PACK, "2.20.2")


def run(there, fixed, side):
    last, facts, said = run_script(PACK, there, fixed, side, "te-cpu")
    return last, facts.get("metrics", {}).get("calls", {}), said


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path, release):
    overlay.apply_fix(transforms.load_fix(PACK.fix), release.site, tmp_path / "fixed")
    last, calls, said = run(release, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert calls["B=2, FP8, dispatched"]["launched"][0]["tensors"] == ["float8_e4m3fn"] * 2


@pytest.mark.network
@pytest.mark.parametrize(("dropped", "last"), [("apply", "BUG_REPRODUCED"), ("route", "CHANGED: B=1: FP8 data")])
def test_without_a_transform_the_patched_side_is_red(tmp_path, release, dropped, last):
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), dropped), release.site, tmp_path / "fixed")
    found, calls, said = run(release, tmp_path / "fixed", "patched")
    assert found.startswith(last), said
    lost = "SparseMLA" if dropped == "apply" else "dispatched"
    assert calls[f"B=1, FP8, {lost}"]["dequantized"] == 2


@pytest.mark.network
@pytest.mark.parametrize(
    ("name", "code", "lines"),
    [
        ("scores", 10, ["dequantized", "mine.py:4 return q @ k.transpose(0, 1) (aten.transpose.int)", "(aten.mm.default)"]),
        ("pointer", 10, ["pointer 0 taken", "mine.py:7 return x.contiguous().data_ptr()"]),
        ("exported", 10, ["pointer 0 taken", "mine.py:10", "plain bfloat16, pointer 0"]),
        ("routed", 0, ["dequantized 0 ×, pointer 0 taken 0 ×"]),
        ("raises", 1, ["raised ValueError: not that shape"]),
        ("nobody", 2, ["--audit mine:nobody"]),
    ],
)
def test_the_audit_says_what_a_function_does(tmp_path, cli, release, name, code, lines):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "fixed").mkdir()
    _, _, said = run_script(
        PACK, release, tmp_path / "fixed", "unpatched", "te-cpu", "--audit", f"mine:{name}", "--shapes", "32x16"
    )
    for line in lines:
        assert line in said
    if name in ("pointer", "routed"):
        done = cli(
            "run", "pack03", "--audit", f"mine:{name}", env={"REPRODUCER_CWD": str(tmp_path)}, cache=files.CACHE, results=False
        )
        assert done.returncode == (1 if code else 0)
        assert lines[-1] in done.stdout


def test_an_audit_is_for_one_release(cli):
    done = cli("run", "pack03", "--releases", "all", "--audit", "mine:f", cache=files.CACHE, results=False)
    assert done.returncode == 2
    assert "one release" in done.stderr


def test_the_receipts_are_what_the_readme_says():
    runs = history.load(files.RESULTS, [PACK]).runs
    readme = (PACK.folder / "README.md").read_text().splitlines()

    def metrics(seen):
        return seen.document().facts.metrics

    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:5]] for line in readme if line.count("|") == 5
    }
    for seen in runs:
        if seen.side == "unpatched" and seen.outcome == "REPRODUCED":
            assert not seen.stale
            column = sum(Version(seen.version) >= Version(first) for first in ("2", "2.16"))
            for name, what in metrics(seen)["contract"].items():
                if name in rows and seen.machine == "linux-x86_64-cpu":
                    assert str(what).startswith(rows[name][column]), (seen.version, name)
    kernels = next(metrics(s)["kernels"] for s in runs if s.cell.variant == "fp8" and s.side == "patched")
    for name in ("bf16", "fp8"):
        cells = [
            cell.strip().replace(",", "")
            for cell in next(line for line in readme if line.startswith(f"| {name} |")).split("|")[2:7]
        ]
        row = kernels[name]
        assert cells[:3] == [f"{row['ms']:.2f}", f"{row['TFLOP/s']:.0f}", f"{row['error']:.2g}"]
        assert cells[3:] == [f"{row['shared memory']}", f"{row['bytes read'] / 1e9:.2f}"]


STORAGES = """\
import json
import sys

import torch
import transformer_engine.pytorch
import transformer_engine_torch as tex
from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa, tilelang_sparse_mla_fwd
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

launched = []


def building(**given):
    def launch(q, kv, indices, *scales):
        launched.append([str(q.dtype), str(kv.dtype), len(scales)])
        return torch.zeros(*q.shape[:3], given["dim"], dtype=torch.bfloat16), torch.zeros(q.shape[:3])

    return launch


def storage(*shape):
    data = torch.zeros(shape, dtype=torch.uint8)
    parts = {"data": data, "fp8_scale_inv": torch.ones(1), "fp8_dtype": tex.DType.kFloat8E4M3, "fake_dtype": torch.bfloat16}
    return Float8TensorStorage(**parts)


tilelang_sparse_mla_fwd._get_sparse_mla_fwd_kernel = building
try:
    indices = torch.zeros(1, 256, 64, dtype=torch.int64)
    tilelang_dsa.fused_sparse_mla_absorbed(storage(256, 1, 16, 576), storage(256, 1, 1, 576), indices, 0.1, 512)
    print(json.dumps({"launched": launched}))
    print("FINE")
except AttributeError as error:
    print(json.dumps({"raises": str(error)}))
    print("RAISES")
"""


@pytest.mark.network
def test_storages_which_are_no_tensors_are_routed_too(tmp_path, release):
    script = tmp_path / "storages.py"
    script.write_text(STORAGES)
    (tmp_path / "none").mkdir()
    overlay.apply_fix(transforms.load_fix(PACK.fix), release.site, tmp_path / "fixed")
    assert run_script(PACK, release, tmp_path / "none", "unpatched", "te-cpu", script=script)[0] == "RAISES"
    last, facts, said = run_script(PACK, release, tmp_path / "fixed", "patched", "te-cpu", script=script)
    assert last == "FINE", said
    assert facts == {"launched": [["torch.float8_e4m3fn", "torch.float8_e4m3fn", 1]]}


@pytest.mark.network
def test_an_audit_takes_the_release_of_a_folder(cli, release):
    done = cli("run", "pack03", "--release-path", release.site, "--audit", "mine:f", cache=files.CACHE, results=False)
    assert "transformer-engine 2.20.2, lane" in done.stdout
    assert "--releases" not in done.stderr
