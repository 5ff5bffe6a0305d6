"""Pack 11: its README says what the receipts say."""

import re

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack11")
CPU = "linux-x86_64-cpu"
RAISED = {"8a29fd5752": "", "a1a73f8449": "TypeError", "64d2e0a62c": "UnboundLocalError", "d48bd6be0a": "UnboundLocalError"}


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.version.split(".tree")[0], s.side, s.machine): s for s in history.load(files.RESULTS, [PACK]).runs}
    readme = (PACK.folder / "README.md").read_text()
    assert not any(s.stale for s in runs.values())
    for commit, error in RAISED.items():
        bad, good = (runs[f"0+git.{commit}", side, CPU] for side in ("unpatched", "patched"))
        assert (bad.outcome, good.outcome) == ("REPRODUCED", "ABSENT")
        lost = re.findall(r"^trigger +FAIL +\w+, 'linear': (\w+)", bad.log(), re.MULTILINE)
        assert lost == [error] * bool(error)
        assert bad.log().count("'Native': UnboundLocalError in compute_language_model_loss") >= 2
    released = [
        s
        for (v, side, m), s in runs.items()
        if m == CPU and side == "unpatched" and "git" not in v and s.outcome == "REPRODUCED"
    ]
    assert released
    for seen in released:
        failed = re.findall(
            r"^trigger +FAIL +(\w+), 'linear': UnboundLocalError in compute_language_model_loss", seen.log(), re.MULTILINE
        )
        assert len(failed) == 2
        assert runs[seen.version, "patched", CPU].outcome == "ABSENT"
    log = runs["0+git.d48bd6be0a", "patched", CPU].log()
    logs = log + runs["0+git.d48bd6be0a", "patched", "linux-x86_64-nvidia-h200-x2"].log()
    found = re.findall(
        r"^trigger +ok +(one rank|rank \d of 4, gloo|rank \d of 2, nccl): (?:GPTModel|HybridModel), .*, against .*  (\S+) \(",
        logs,
        re.M,
    )
    worst = {end: max(float(error) for place, error in found if place.endswith(end)) for end in ("one rank", "gloo", "nccl")}
    assert f"{worst['one rank']:.1e}" == f"{worst['gloo']:.1e}"
    assert f"off by at most {worst['one rank']:.1e}" in readme
    assert f"sequence parallel, by as much, through NCCL by {worst['nccl']:.1e}" in readme
    times = re.findall(r"(?:GPTModel|HybridModel), (?:.P=2, )?bf16: .* off by (\S+) roundings", log)
    assert f"no more than {max(map(float, times)):.1f} roundings" in readme
    for impl in ("not fused", "native", "linear"):
        gb = re.findall(rf"S=4096 B=4 V=151936, bf16 logits of 4.98 GB: peaks .*?{impl} ([\d.]+)", log)
        row = next(line for line in readme.splitlines() if line.startswith(f"| {impl}"))
        assert row.endswith("| {} GB | {} GB |".format(*gb[:2]))
    device = runs["0+git.d48bd6be0a", "patched", "linux-x86_64-nvidia-h200-x2"]
    assert device.outcome == "ABSENT"
    assert "rank 1 of 2, nccl: HybridModel" in device.log()
