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
    readme = (PACK.folder / "README.md").read_text()
    found = [s for s in history.load(files.RESULTS, [PACK]).runs if s.cell.variant == "d48bd6be0a"]
    cpu, gpu = "linux-x86_64-cpu", "linux-x86_64-nvidia-h200-x2"
    runs = {(s.side, s.machine): s for s in found if not s.stale}
    for machine in (cpu, gpu):
        bad = runs["unpatched", machine]
        assert bad.outcome == "REPRODUCED"
        failed = re.findall(r"^trigger +FAIL +(.*)", bad.log(), re.MULTILINE)
        assert len([name for name in failed if "Unsupported architecture" in name]) == 7
        assert len([name for name in failed if "has no attribute 'forward'" in name]) == 4
        assert len(failed) == 11
        assert runs["patched", machine].outcome == "ABSENT"
    log = runs["patched", cpu].log()
    plain = max(
        worst(log, f"one rank: {way}:") for way in ("none", "sum", "mean", "label 7 ignored", "hidden states without a batch")
    )
    assert f"hidden states [tokens, H] | {plain:.1e} |" in readme
    sizes = max(worst(log, f"one rank: {size}:") for size in ("V=1000", "V=8192", "64 tokens, H=256 V=151936 torch.float32"))
    assert f"| V=1000, V=8192, V=151936 | {sizes:.1e} |" in readme
    roundings = re.findall(r"V=151936 torch.bfloat16: .*off by (\S+) roundings", log)
    assert f"| {max(map(float, roundings)):.1f} roundings |" in readme
    far = [worst(log, f"one rank: logits around {shift}:") for shift in ("-128", "1000")]
    assert "| {:.1e}, {:.1e} |".format(*far) in readme
    for way, row in (
        ("TP", "TP=2 beside another group of two, and TP=4: each rank, gloo"),
        ("SP", "the same with sequence parallelism"),
    ):
        all_ = [worst(log, rf"rank \d of 4, gloo: {way}=\d, {how}:") for how in ("none", "sum", "mean")]
        assert f"| {row} | {max(all_):.1e} |" in readme
    roundings = re.findall(r"gloo: [TS]P=\d, none, bf16: .*off by (\S+) roundings", log)
    assert f"| both in bf16 | {max(map(float, roundings)):.1f} roundings |" in readme
    log = runs["patched", gpu].log()
    plain = max(worst(log, f"one rank: {way}:") for way in ("none", "sum", "mean", "label 7 ignored"))
    nccl = max(float(e) for e in re.findall(r"of 2, nccl: (?!.*-128).*?  (\S+) \(limit", log))
    model, gloo = worst(log, "one rank: GPTModel"), worst(log, r"rank \d of 4, gloo: (?!.*-128)")
    assert (
        f"{plain:.1e} at most of the function on one rank at these sizes ({worst(log, 'one rank: logits around 1000'):.2e} for"
        in readme
    )
    assert f"{model:.1e} of GPTModel, {nccl:.1e} on two ranks through NCCL, {gloo:.1e} on two and four through gloo" in readme
    large = worst(log, "one rank: 2048 tokens, H=4096 V=151936 torch.float32:")
    roundings = max(map(float, re.findall(r"2048 tokens, H=4096 V=151936 torch.bfloat16: .*off by (\S+) roundings", log)))
    assert f"{large:.1e} in fp32 and {roundings:.1f} roundings in bf16" in readme
