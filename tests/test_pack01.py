"""Pack 01: its lane finds what waits for the GPU and nothing else; its README says what the receipts say."""

import json
import re
import subprocess

import pytest
from helpers import ROOT, installed

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack01")
CPU, GPU = "linux-x86_64-cpu", "linux-x86_64-nvidia-h200"
WAITS = {
    "cu[0].item()": ".item()",
    "bool(cu.any())": ".item()",
    "torch.equal(cu, cu + 1)": "torch.equal",
    "cu[cu > 3]": "boolean index",
    "cu.nonzero()": "boolean index",
    "torch.repeat_interleave(cu, cu)": "repeat_interleave without output_size",
    "torch.tensor(3, device=cu.device)": "copy between CPU and GPU",
    "cu.cpu()": "copy between CPU and GPU",
    "torch.tensor(3).to(cu.device, non_blocking=True)": "copy between CPU and GPU",
    "cu.to('cpu', non_blocking=True)": "copy between CPU and GPU",
    "cu.index_put_((cu > 3,), cu[:1])": "boolean index",
    "cu.__setitem__(cu > 3, cu[:1])": "boolean index",
    "cu[torch.tensor([0, 1])]": "index on the CPU",
    "torch.cuda.synchronize()": "torch.cuda.synchronize",
}
FREE = [
    "cu.cumsum(0)",
    "cu[1:] - cu[:-1]",
    "torch.repeat_interleave(cu, cu, output_size=48)",
    "torch.where(cu > 3, cu, 0)",
    "cu.__setitem__(cu > 3, 0)",
    "cu.is_cuda and cu.clone()",
]
PROGRAM = """
import json, sys, torch, fake_cuda
fake_cuda.prepare()
found = {}
for code in json.loads(sys.argv[1]):
    with torch.cuda.stream(torch.cuda.Stream()):
        cu = torch.tensor([0, 16, 48], device="cuda:0")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            eval(code)
        found[code] = ""
    except RuntimeError as error:
        found[code] = str(error)
print(json.dumps(found))
"""


@pytest.mark.network
def test_the_lane_refuses_what_waits_and_nothing_else(tmp_path):
    there = installed(PACK, "0.19.2")
    env = {"PYTHONPATH": f"{ROOT / 'common/lanes'}"}
    command = [there.python, "-c", PROGRAM, json.dumps([*WAITS, *FREE])]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    found = json.loads(done.stdout)
    assert {code for code, said in found.items() if not said} == set(FREE)
    for code, what in WAITS.items():
        assert f" {what}: " in found[code]


def test_the_receipts_are_what_the_readme_says():
    runs = {
        (s.version.split(".tree")[0], s.cell.variant, s.side, s.machine): s for s in history.load(files.RESULTS, [PACK]).runs
    }
    readme = (PACK.folder / "README.md").read_text()
    lines = readme.split("```text\n")[1].split("```")[0].splitlines()
    first = "build_packed_allgather_cp_local_positions"
    reported = {
        "scatter_topk_into_index_mask",
        "extract_query_positions_from_position_ids",
        "build_fused_indexer_varlen_bounds",
    }
    subjects = [(version, "") for version in ("0.19.0", "0.19.1", "0.19.2")]
    subjects += [(f"0+git.{commit}", commit) for commit in ("da482cf5c8", "d1cab16a01", "d98e8a64dd")]
    for version, commit in subjects:
        seen = runs[version, f"{commit}-others" if commit else "others", "unpatched", CPU]
        failed = set(re.findall(r"^trigger +FAIL +(\w+)", seen.log(), re.MULTILINE))
        assert failed >= reported if commit == "da482cf5c8" else not failed & reported
        for machine in (CPU, GPU) if commit != "d1cab16a01" else (CPU,):
            bad, good = (runs[version, commit, side, machine] for side in ("unpatched", "patched"))
            assert not bad.stale
            assert not good.stale
            assert (bad.outcome, good.outcome) == ("REPRODUCED", "ABSENT")
            failed = re.findall(r"^trigger +FAIL +(\w+).*", bad.log(), re.MULTILINE)
            assert set(failed) == {first, "_validate_nonpacked_cp_uniform_length"}
            if version == "0.19.2":
                places = {line[: line.index(": ")] for line in lines} if machine == CPU else {"dsa_layout.py:249", "dsa.py:235"}
                assert set(re.findall(r"dsa\w*\.py:\d+", bad.log())) == places
                assert machine == GPU or all(line in bad.log() for line in lines)
    found = re.findall(r"ok +(\w+), (\d+) cases, cpu: ", runs["0.19.2", "", "patched", CPU].log())
    cases = {name: int(number) for name, number in found}
    assert f"in {cases.pop(first)} cases of packed rows and {sum(cases.values())} of the others" in readme
    study = runs["0+git.da482cf5c8", "da482cf5c8-scatter", "unpatched", CPU].document().facts.metrics
    wrong = {name: right for name, right in study.items() if right != 300}
    assert wrong == {"clamp, scatter, put slot 0 back, mask additive, below 0: right of 300": 5}
    assert "mask in 5 of 300" in readme
