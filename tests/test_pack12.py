"""Pack 12: its README says what the receipts say."""

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack12")
H100, H200, CPU = "linux-x86_64-nvidia-h100-80gb-hbm3", "linux-x86_64-nvidia-h200", "linux-x86_64-cpu"


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.version, s.side, s.machine, s.cell.variant): s for s in history.load(files.RESULTS, [PACK]).runs if s.side}
    readme = (PACK.folder / "README.md").read_text().splitlines()
    ranges = {
        "0.16.0, 0.16.1": ("0.16.0", "0.16.1"),
        "0.17.0rc0 – 0.18.2": ("0.17.0rc0", "0.18.2"),
        "0.19.0 – 0.19.2": ("0.19.0", "0.19.2"),
    }
    for start, versions in ranges.items():
        row = next(line for line in readme if line.startswith(f"| {start} |"))
        for version in versions:
            bad, good = runs[version, "unpatched", CPU, ""], runs[version, "patched", CPU, ""]
            assert not bad.stale
            assert not good.stale
            old = bad.document().facts.metrics
            assert f"| {old['forward peak GiB']:.1f}, {old['backward peak GiB']:.1f} GiB |" in row
            for seen in (good, runs[version, "patched", H100, ""]):
                new = seen.document().facts.metrics
                assert seen.verdict.claims == ("MEMORY_SAVE_VERIFIED",)
                assert f"| {new['forward peak GiB']:.2f}, {new['backward peak GiB']:.2f} GiB |" in row
                assert all(gib < 6.7 for name, gib in new.items() if name.endswith("GiB"))
            assert runs[version, "unpatched", H100, ""].document().facts.metrics["out of memory"]
            long = good.document().facts.metrics["validate"]
            assert f"{long['S=32768 B=1: forward peak GiB']:.1f} and {long['S=32768 B=1: backward peak GiB']:.1f}" in " ".join(
                readme
            )
    for version in ("0.16.1", "0.18.2", "0.19.2"):
        at = next(i for i, line in enumerate(readme) if line.startswith(f"| {version} |"))
        found = runs[version, "patched", H200, "measure"].document().facts.metrics
        for row, heads in zip(readme[at : at + 3], (1, 32, 128), strict=True):
            released, fixed = (found[f"{heads} heads, {name}"] for name in ("released", "fixed"))
            said = released if isinstance(released, str) else f"{released['median']:.1f} ms"
            ratio = "" if isinstance(released, str) else f"{fixed['median'] / released['median']:.2f} "
            assert row.endswith(f"| {heads} | {said} | {fixed['median']:.1f} ms | {ratio}|")
