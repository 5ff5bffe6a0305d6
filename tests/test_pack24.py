"""Pack 24: its README says what the receipts say."""

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack24")
CPU = "linux-x86_64-cpu"


def rows(readme):
    """Cells of each row, by its first one; of two with one name the later."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in readme.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines}


def test_the_receipts_are_what_the_readme_says():
    readme = (PACK.folder / "README.md").read_text()
    runs = [s for s in history.load(files.RESULTS, [PACK]).runs if s.machine == CPU]
    assert not any(s.stale for s in runs)
    found = {
        (s.version, s.side): s.document().facts.metrics
        for s in runs
        if s.cell.variant == "" and s.outcome in ("REPRODUCED", "ABSENT")
    }
    first, second = (rows(part) for part in readme.split("## Orders that are not bugs"))
    for name, case, fixed in (
        ("`to_empty`, `load_state_dict`", "assign=False", False),
        ("from meta: `load_state_dict(assign=True)`", "assign=True", True),
        ("converted without FP8 all-gather", "no FP8 all-gather", False),
    ):
        for (version, side), metrics in found.items():
            cell = first[name][0] if side == "unpatched" or not fixed else first[name][1]
            assert cell == f"{metrics[case]['bytes']:,}", (version, side, name)
    orders = {s.side: s.document().facts.metrics for s in runs if s.cell.variant == "orders"}
    row = first["from meta: `set_model_state_dict`, full and broadcast from rank 0"]
    name = "from meta, set_model_state_dict"
    assert row == [f"{orders[side][name]['bytes']:,}" for side in ("unpatched", "patched")]
    measured = orders["unpatched"]
    words = {
        "set_model_state_dict": "`set_model_state_dict`, full and broadcast from rank 0",
        "fully_shard": "`fully_shard`",
        "without FP8 all-gather": "with `enable_fsdp_float8_all_gather=False`",
    }
    words |= {"compile, ": "`linear.compile()`, ", "load with assign=True": "load with `assign=True`"}
    words |= {"precompute, optimizer.step(), precompute": "precompute, `optimizer.step()`, precompute"}
    words |= {"bf16 parameters: load with assign=True": "the same from meta, loaded with `assign=True`"}
    words |= {"bf16 parameters: convert": "`MixedPrecisionPolicy(torch.bfloat16)`: convert"}
    for name, row in measured.items():
        row_name = name
        for old in sorted(words, key=len, reverse=True):
            row_name = row_name.replace(old, words[old]) if words[old] not in row_name else row_name
        row_name = "precompute, `optimizer.step()` to 8 × the weights" if name == "precompute, optimizer.step()" else row_name
        cells = second[row_name]
        if "bytes" in row:
            assert cells[:3] == [f"{row['bytes']:,}", str(row["all_reduce"]), f"{row['error']:.2g}"], name
        assert "raises" not in row or cells[3].startswith("loud")
        assert row.get("compiled") is not True
