"""Packs 17 and 18: their READMEs say what the receipts say."""

import re

from common import files
from common.packs.pack import find
from common.store import history

CPU = "linux-x86_64-cpu"


def recorded(name):
    runs = [s for s in history.load(files.RESULTS, [find(name)]).runs if s.machine == CPU and s.cell.variant == ""]
    assert not any(seen.stale for seen in runs)
    return {(s.version, s.side): s for s in runs}


def test_pack18_is_off_by_what_its_table_says():
    runs = recorded("pack18")
    assert {seen.outcome for (_, side), seen in runs.items() if side == "unpatched"} == {"REPRODUCED"}
    assert {seen.outcome for (_, side), seen in runs.items() if side == "patched"} == {"ABSENT"}
    readme = (find("pack18").folder / "README.md").read_text()
    shown = dict(re.findall(r"^\| (.+) \| off by ([\d.]+) \| right \|$", readme, re.MULTILINE))
    words = {
        "times 0.5, 0.5": "backward of 0.5 × loss, then of 0.5 × loss",
        "times 0.5, 1": "backward of 0.5 × loss, then of the loss",
    }
    words |= {"each by autograd.grad": "`autograd.grad` of 0.5 × loss for x, then for w"}
    off = re.findall(r"^trigger +FAIL +(.+?)  (\S+) \(limit", runs["0.8.5", "unpatched"].log(), re.MULTILINE)
    assert len(off) == 2 * len(shown) == 6
    for name, error in off:
        assert f"{float(error):.2g}" == shown[next(words[w] for w in words if name.endswith(w))]


def test_pack17_is_wrong_where_its_table_says():
    runs = recorded("pack17")
    for (version, side), seen in runs.items():
        if side == "patched":
            assert seen.outcome in ("ABSENT", "NOTHING_TO_PATCH")
            continue
        numbers = tuple(map(int, version.split(".")))
        if numbers >= (0, 6, 4):
            raised = "no attribute 'detach'" in seen.log()
            assert seen.outcome == "REPRODUCED"
            assert raised == (numbers < (0, 8))
        else:
            assert seen.outcome == ("CHANGED" if numbers >= (0, 6, 3) else "ABSENT")
