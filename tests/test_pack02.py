"""Pack 02: its README says what the receipts say."""

import re

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack02")
H100 = "linux-x86_64-nvidia-h100-80gb-hbm3"


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.side, s.machine, s.cell.variant): s for s in history.load(files.RESULTS, [PACK]).runs if s.version == "0.19.2"}
    assert not any(seen.stale for seen in runs.values())
    lines = (PACK.folder / "README.md").read_text().splitlines()
    row = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines if line.startswith("|")
    }
    lowered = runs["patched", "linux-x86_64-cpu", ""].log()
    for label, kernel in (("forward, bytes of shared memory", "forward"), ("backward", "backward")):
        for shape, said in zip(("128/64", "192/128", "320/256", "576/512"), row[label], strict=True):
            assert f"{shape}, {kernel}: lowered for sm_90a, {said} bytes of shared memory" in lowered
    for side, name, start in (
        ("unpatched", "576 channels, 512 of value, 64 heads", "576/512, as released"),
        ("patched", "128 channels, 64 of value, 64 heads", "128/64"),
        ("patched", "192 channels, 128 of value, 64 heads", "192/128"),
        ("patched", "320 channels, 256 of value, 64 heads", "320/256"),
        ("patched", "192 channels, 128 of value, 128 heads", "192/128, 128 heads, S=2048 B=1, top-k of 1024"),
    ):
        for what, said in zip(("out", "dq", "dkv"), row[start], strict=True):
            found = re.search(rf"ok +{name}: {what} against fp64  (\S+) ", runs[side, H100, ""].log())
            assert found, name
            assert f"{float(found[1]):.1e}" == said
    peaks = runs["patched", "linux-x86_64-nvidia-h200", "memory"].document().facts.metrics
    for length in (1024, 4096, 8192, 16384, 32768):
        peak = peaks[f"S={length}, GiB"]
        unfused = f"{peak['unfused']:.2f} GiB" if peak["unfused"] else "out of memory"
        assert row[str(length)] == [unfused, f"{peak['fused']:.2f} GiB"]
