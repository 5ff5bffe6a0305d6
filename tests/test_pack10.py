"""Pack 10: its README says what the receipts say."""

import re

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack10")


def worst(log, start):
    """The largest error of the checks whose names begin so."""
    return max(float(error) for error in re.findall(rf"^trigger +ok +{start}.*?against fp64  (\S+) ", log, re.MULTILINE))


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.side, s.machine): s for s in history.load(files.RESULTS, [PACK]).runs if s.cell.variant == "d48bd6be0a"}
    for machine in ("linux-x86_64-cpu", "linux-x86_64-nvidia-h200-x2"):
        bad, good = (runs[side, machine] for side in ("unpatched", "patched"))
        assert not bad.stale
        assert not good.stale
        assert (bad.outcome, good.outcome) == ("REPRODUCED", "ABSENT")
        failed = re.findall(r"^trigger +FAIL +(.*)", bad.log(), re.MULTILINE)
        assert len([name for name in failed if "Unsupported architecture" in name]) == 4
        assert len([name for name in failed if "has no attribute 'forward'" in name]) == 1
        assert len([name for name in failed if "V=143360, logits around -" in name]) == 4
        assert len(failed) == 9
        assert bad.log().count("every loss is -inf") == 8  # seen, and in the line of JSON
        assert max(map(float, re.findall(r"logits around 0: error of the loss  (\S+) ", bad.log()))) < 1e-6
    assert "rank 1 of 2, nccl: " in good.log()
    assert "one rank: 4096 tokens, H=4096 V=151936 torch.bfloat16: dW" in good.log()
    readme = (PACK.folder / "README.md").read_text()
    log = runs["patched", "linux-x86_64-cpu"].log()
    plain = max(worst(log, f"one rank: {way}:") for way in ("none", "sum", "mean", "label 7 ignored"))
    assert f"another `ignore_index` | {plain:.1e} |" in readme
    big = "one rank: 64 tokens, H=256 V=151936 torch.float32"
    assert f"| V=151936 | {worst(log, big):.1e} |" in readme
    roundings = re.findall(r"off by (\S+) roundings", log)
    assert f"| {max(map(float, roundings)):.1f} roundings |" in readme
    far = [worst(log, f"one rank: logits around {shift}:") for shift in ("-128", "1000")]
    assert "| {:.1e}, {:.1e} |".format(*far) in readme
    for way, row in (("TP=2", "TP=2, each rank, gloo"), ("SP=2", "TP=2 with sequence parallelism, each rank, gloo")):
        both = max(worst(log, f"rank {rank} of 2, gloo: {way}, {how}:") for rank in (0, 1) for how in ("none", "sum", "mean"))
        assert f"| {row} | {both:.1e} |" in readme
