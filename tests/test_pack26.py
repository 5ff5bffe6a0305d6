"""Pack 26: its README says what the receipts say."""

import re

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack26")
CPU, GPU = "linux-x86_64-cpu", "linux-x86_64-nvidia-h200"
COLUMNS = (
    "each token, all weights 1: gradient",
    "each token, weighted: gradient",
    "each token, gradient of stride 0: gradient",
    "mean, 4 of 24 labels ignored: gradient",
)


def cells(log):
    """What the README's row has to say of one run."""
    for name in COLUMNS:
        found = re.search(rf"^trigger +(?:ok|FAIL) +{re.escape(name)}  (not finite|\S+)", log, re.MULTILINE)
        said = found[1] if found else "cannot ignore labels"
        yield (
            "right" if said[0].isdigit() and float(said) < 1e-7 else f"off by {float(said):.2f}" if said[0].isdigit() else said
        )
    yield "right" if "transposed: 0 numbers written out of bounds" in log else "writes out of bounds"
    for layout in ("logits[:, :-1]", "labels[:, 1:]"):
        said = re.search(rf"each token, {re.escape(layout)}: loss  (\S+)", log)[1]
        outside = ", writes outside" * (f"trigger   ok       each token, {layout}: 0 numbers written" not in log)
        yield ("right" if float(said) < 1e-7 else f"loss off by {float(said):.2f}") + outside
    yield "right" if re.search(r"^trigger +ok +torch\.\w+, labels of probability near 1", log, re.MULTILINE) else "wrong"


def test_the_receipts_are_what_the_readme_says():
    runs = history.load(files.RESULTS, [PACK]).runs
    found = {(s.version, s.side, s.machine): s for s in runs}
    assert not any(seen.stale for seen in runs)
    assert all(s.outcome == found[s.version, s.side, CPU].outcome for s in runs)
    readme = (PACK.folder / "README.md").read_text()
    versions = [s.version for s in runs if s.machine == CPU and s.side == "unpatched" and s.outcome in ("REPRODUCED", "ABSENT")]
    for row in (line for line in readme.splitlines() if line.startswith("| 2.") and "with the fix" not in line):
        named = re.split(", | – ", row.split("|")[1].strip())
        of_row = versions[versions.index(named[0]) : versions.index(named[-1]) + 1]
        assert of_row
        for version in of_row:
            seen = found[version, "unpatched", CPU]
            assert [cell.strip() for cell in row.split("|")[2:10]] == list(cells(seen.log())), version
            assert seen.outcome == ("ABSENT" if "BUG_ABSENT" in row else "REPRODUCED")
            assert seen.outcome == "ABSENT" or found[version, "patched", CPU].outcome == "ABSENT"
            versions.remove(version)
    assert not versions
    on_gpu = [s.version for s in runs if s.machine == GPU and s.side == "unpatched"]
    assert all(f" {version}" in readme.split("(`device:sm_90`)")[1].split("give")[0].replace("\n", " ") for version in on_gpu)
    for machine, version, roundings in ((GPU, "2.17.0", "3930"), (CPU, "2.17.0", "71")):
        times = re.search(r"gradient, in roundings  (\S+)", found[version, "unpatched", machine].log())[1]
        assert f"{float(times):.0f}" == roundings
        assert f"by {roundings} times" in readme
