"""What a machine is called, by the GPUs that a run may use."""

import pytest

from common.install import machine

SMI = """#!/bin/sh
for word in "$@"; do case "$word" in --id=*) chosen=${word#--id=};; esac; done
for gpu in 0 1; do case ",${chosen:-0,1}," in *,$gpu,*) echo "NVIDIA H200, 580.1, 9.0, 143771 MiB";; esac; done
"""


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A machine with two GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    machine.gpu.cache_clear()
    yield
    machine.gpu.cache_clear()


@pytest.mark.parametrize(
    ("visible", "name"), [(None, "nvidia-h200-x2"), ("0,1", "nvidia-h200-x2"), ("1", "nvidia-h200"), ("-1", "cpu")]
)
def test_a_machine_is_called_by_the_gpus_that_a_run_may_use(two, monkeypatch, visible, name):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.machine_name().endswith(name)
