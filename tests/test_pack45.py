"""Pack 45: its README says what the receipts say."""

import re

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack45")


def test_the_receipts_are_what_the_readme_says():
    found = [s for s in history.load(files.RESULTS, [PACK]).runs if s.cell.variant == "d48bd6be0a" and not s.stale]
    runs = {(s.side, s.machine): s for s in found}
    for machine in ("linux-x86_64-cpu", "linux-x86_64-nvidia-h100-80gb-hbm3"):
        bad, good = (runs[side, machine] for side in ("unpatched", "patched"))
        assert (bad.outcome, good.outcome) == ("REPRODUCED", "ABSENT")
        failed = re.findall(r"^trigger +FAIL +(.*)", bad.log(), re.MULTILINE)
        assert len(failed) == 4  # two kernels, around -128 and -10000
        assert all("V=143360" in name and "not finite" in name for name in failed)
        assert len(re.findall(r"^signature seen .*is -inf", bad.log(), re.MULTILINE)) == 4
        assert max(map(float, re.findall(r"^control +ok .* (\S+) \(limit 1e-04\)", bad.log(), re.MULTILINE))) < 1e-6
