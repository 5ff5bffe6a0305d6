"""Pack 22: its README says what the receipts say."""

from packaging.specifiers import SpecifierSet

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack22")
CPU, GPU = "linux-x86_64-cpu", "linux-x86_64-nvidia-h100-80gb-hbm3"
ROWS = {
    "none": "no checkpoint",
    "the first": "reentrant over 0 of 4 blocks",
    "the second": "reentrant over 1 of 4 blocks",
    "the second, `use_reentrant=False`": "not reentrant over 1 of 4 blocks",
    "all four": "reentrant over 0, 1, 2, 3 of 4 blocks",
    "the first, in a second `te.checkpoint`": "nested over 0 of 4 blocks",
}


def test_the_receipts_are_what_the_readme_says():
    lines = (PACK.folder / "README.md").read_text().splitlines()
    runs = [s for s in history.load(files.RESULTS, [PACK]).runs if s.machine == CPU]
    assert not any(s.stale for s in runs)
    judged = [s for s in runs if s.cell.variant == "" and s.outcome in ("REPRODUCED", "ABSENT")]
    assert {s.outcome for s in judged if s.side == "patched"} == {"ABSENT"}
    for seen in judged:
        remembered = seen.document().facts.metrics["remembered"]
        for row, name in ROWS.items():
            cells = [c.strip() for line in lines if line.startswith(f"| {row} |") for c in line.split("|")[2:6]]
            old = seen.version in SpecifierSet("<2.4.0")
            column = 3 if seen.side == "patched" else 0 if old else 1
            assert cells[column] == str(remembered[f"fwd, function of 16, {name}"]), (seen.version, seen.side, row)
            assert cells[3 if seen.side == "patched" else 2] == str(remembered[f"bwd, function of 16, {name}"])
        long = remembered["fwd, function of 1024, reentrant over 0 of 4 blocks"]
        assert long == (512 if seen.side == "unpatched" and seen.version not in SpecifierSet("<2.4.0") else 1024)


def metrics(variant, version="2.20.2"):
    """Of a variant, on both machines and both sides."""
    runs = {
        (s.machine, s.side): s
        for s in history.load(files.RESULTS, [PACK]).runs
        if (s.cell.variant, s.version) == (variant, version)
    }
    assert not any(s.stale for s in runs.values())
    return {key: seen.document().facts.metrics for key, seen in runs.items()}


def cells(start, count):
    lines = (PACK.folder / "README.md").read_text().splitlines()
    return [c.strip() for c in next(line for line in lines if line.startswith(f"| {start} |")).split("|")[2 : 2 + count]]


def test_by_default_the_gpu_forgets_in_nested_checkpoints_alone():
    for (machine, side), found in metrics("").items():
        if machine == GPU:
            steps = {name: steps for name, steps in found["remembered"].items() if ", max of 16" in name}
            assert len(steps) == 10
            assert {name for name, n in steps.items() if n != 16} == (
                {"fwd, max of 16, nested over 0 of 4 blocks"} if side == "unpatched" else set()
            )
            assert 8 in steps.values() or side == "patched"


def test_what_it_costs_is_what_was_measured():
    found = metrics("costs")
    for start, side, row in (
        ("no checkpointing", "unpatched", "0 of 4 blocks checkpointed"),
        ("the first of four blocks recomputed", "unpatched", "1 of 4 blocks checkpointed"),
        ("that with the fix", "patched", "1 of 4 blocks checkpointed"),
    ):
        cpu, gpu = (found[machine, side][row] for machine in (CPU, GPU))
        assert cells(start, 4) == [
            str(cpu["saturated"]),
            str(gpu["saturated"]),
            f"{cpu['gradient']:.3g}",
            f"{gpu['gradient']:.3g}",
        ]


def test_the_other_uses_and_the_graphs_are_what_was_measured():
    others, graphs = metrics("others"), metrics("graphs")
    for start, row in (
        ("one step after the other", "one step after the other"),
        ("two microbatches, one backward of both", "two microbatches, one backward"),
        ("a step whose loss is dropped", "a step whose loss is dropped"),
        ("an evaluation between forward and backward", "an evaluation before the backward"),
    ):
        assert cells(start, 4) == [
            f"{others[m, side][row]['gradient']:.3g}" for m in (CPU, GPU) for side in ("unpatched", "patched")
        ]
    columns = "on the GPU", "copies", "casts and transposes", "amax and scale updates", "launches", "launches of graphs"
    for side in ("unpatched", "patched"):
        for row, counts in graphs[GPU, side].items():
            assert cells(row, 6) == [str(counts[column]) for column in columns]
