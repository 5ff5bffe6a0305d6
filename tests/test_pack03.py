"""Pack 03: the audit tells what a function does to FP8 tensors, and the README says what the receipts say."""

import pytest
from helpers import installed
from packaging.version import Version

from common import files
from common.packs.pack import find
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

def bytes_of(x):
    return x._data.view(torch.float8_e4m3fn)

def shape(x):
    return x.shape

def dtype(x):
    return x.dtype is torch.bfloat16

def detached(x):
    return x.detach()

def ends(x):
    import os
    os._exit(0)

def forks(x):
    import os
    if (pid := os.fork()) == 0:
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    return x.detach()

def handle(x):
    x.detach()
    return lambda: x.data_ptr()

def extension(x):
    import transformer_engine_torch
    return transformer_engine_torch.dequantize(x, 1)

def metadata(x):
    return x.get_metadata()["data"].data_ptr()

def leaves(x):
    raise SystemExit(0)

def later(x):
    yield x.shape

def untouched(x):
    return 1

def raises(x):
    raise ValueError("not that shape")
"""


@pytest.fixture(scope="module")
def release():
    return installed(PACK, "2.20.2")


@pytest.mark.network
@pytest.mark.parametrize(
    ("name", "code", "lines"),
    [
        ("scores", 10, ["dequantized", "mine.py:4 return q @ k.transpose(0, 1) (aten.transpose.int)", "(aten.mm.default)"]),
        ("pointer", 10, ["address taken", "mine.py:7 return x.contiguous().data_ptr()"]),
        ("exported", 10, ["address taken", "mine.py:10"]),
        ("bytes_of", 1, ["FP8 bytes are read", "dequantized 0 ×, address taken 0 ×"]),
        ("shape", 1, ["only asked for their shape"]),
        ("dtype", 1, ["only asked for their shape"]),
        ("detached", 0, ["dequantized 0 ×, address taken 0 ×"]),
        ("ends", 1, ["raised SystemExit: os._exit(0)"]),
        ("forks", 1, ["it forked"]),
        ("handle", 1, ["what it returned runs later"]),
        ("extension", 10, ["dequantized    1 ×"]),
        ("metadata", 1, ["FP8 bytes are read"]),
        ("raises", 1, ["raised ValueError: not that shape"]),
        ("leaves", 1, ["raised SystemExit"]),
        ("later", 1, ["what it returned runs later"]),
        ("untouched", 1, ["were not looked at"]),
        ("nobody", 2, ["--audit mine:nobody"]),
    ],
)
def test_the_audit_says_what_a_function_does(tmp_path, cli, name, code, lines):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    done = cli(
        "run", "pack03", "--audit", f"mine:{name}", env={"REPRODUCER_CWD": str(tmp_path)}, cache=files.CACHE, results=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    for line in lines:
        assert line in done.stdout + done.stderr


def test_an_audit_is_for_one_release(cli):
    done = cli("run", "pack03", "--releases", "all", "--audit", "mine:f", cache=files.CACHE, results=False)
    assert done.returncode == 2
    assert "one release" in done.stderr


def test_the_receipts_are_what_the_readme_says():
    runs = [s for s in history.load(files.RESULTS, [PACK]).runs if s.machine == "linux-x86_64-cpu"]
    assert not any(seen.stale for seen in runs)
    lines = [line for line in (PACK.folder / "README.md").read_text().splitlines() if line.count("|") == 4]
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:4]] for line in lines}
    contracts = {
        s.version: s.document().facts.metrics["contract"]
        for s in runs
        if s.cell.variant == "contract" and s.side == "unpatched"
    }
    affected = {s.version for s in runs if s.cell.variant == "" and s.outcome == "REPRODUCED"}
    assert set(contracts) == affected
    for version, contract in contracts.items():
        for name, what in contract.items():
            assert str(what) == rows[name][Version(version) >= Version("2.16")], (version, name)


@pytest.mark.network
def test_an_audit_takes_the_release_of_a_folder(cli, release):
    done = cli("run", "pack03", "--release-path", release.site, "--audit", "mine:f", cache=files.CACHE, results=False)
    assert "transformer-engine 2.20.2, lane" in done.stdout
    assert "--releases" not in done.stderr
