"""Every number of a pack's text that is filed is in a receipt: rounded to the digits that it is written with, in the unit that stands behind it."""

import json
import math
import re
import statistics

import pytest
from helpers import ROOT

from common.packs.pack import find
from common.publish import attach
from common.store import receipt

RESULTS = ROOT / "results"
#: Numbers that no run has to show: given by the trigger or an article, a version, a quotient of two that stand beside it.
GIVEN = {
    "pack09": {
        "1.12": "202.5 ms beside 181.5 ms",
        "1.40": "17.0 ms beside 12.2 ms",
        "4.7e-2": "the article's",
        "1e-9": "the factor of a trigger",
    },
    "pack27": {"2.7": "0.072 beside 0.0265", "1e-5": "the limit of a control", "8": "the factor of a control"},
    "pack26": {"1.7e-4": "1 - the probability of the label, by the script's logits"},
}
NUMBER = re.compile(r"(?<![\w.#/-])(\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?)\s*(%|times|MiB|GiB|ms\b|×)?")
SCALES = {"%": (100, 1), "MiB": (2**-20, 1), "GiB": (2**-30, 2**-10, 1), "ms": (1, 1000)}


def numbers(value):
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield abs(float(value))


def recorded(pack):
    """All numbers of a pack's records: errors, limits, metrics, and those in the names of its checks."""
    found = set()
    for root in (RESULTS, *receipt.reviews(RESULTS)):
        for path in root.glob(f"*/{pack.name}/*.json"):
            facts = json.loads(path.read_text())["predicate"]["reproducer"]
            found |= set(numbers([facts.get(name) for name in ("bug_error", "control_error", "limit", "metrics")]))
            for line in (path.parent / facts["log"]["name"]).read_text().splitlines():
                if line.startswith("{"):
                    said = json.loads(line)
                    checks = said.get("checks", ())
                    found |= set(numbers([said.get("metrics"), [(c.get("error"), c.get("limit")) for c in checks]]))
                    found |= {float(word) for check in checks for word in re.findall(r"\d+(?:\.\d+)?", check["name"])}
    return found


def told(text):
    """Numbers with a decimal point, an exponent or a unit; whole ones without are counts and shapes, and code is code."""
    for pattern in (r"```.*?```", r"`[^`]*`", r"\[[^\]]*\]\([^)]*\)"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    for match in NUMBER.finditer(text):
        number, unit = match.groups()
        is_version = re.match(r"\.\d|\w", text[match.end(1) : match.end(1) + 2]) or re.search(r"\d\.$", text[: match.start()])
        if ("." in number or "e" in number or unit) and not is_version:
            yield number, unit


def is_backed(number, unit, known):
    value = float(number.replace(",", ""))
    digits = len(re.sub(r"e.*|[,.]", "", number).lstrip("0")) or 1
    room = 0.5 * 10 ** (math.floor(math.log10(value)) - digits + 1) * 1.001 if value else 0
    return any(abs(each * scale - value) <= room for each in known for scale in SCALES.get(unit, (1, 100)))


@pytest.mark.parametrize("name", ["pack05", "pack09", "pack19", "pack24", "pack26", "pack27", "pack30"])
def test_every_number_is_in_a_receipt(name):
    pack = find(name)
    readme = (pack.folder / "README.md").read_text()
    text = "\n".join(attach.section(readme, each) for each in ("Trigger", "Fix", "Scope claimed", "Scope NOT claimed"))
    known = recorded(pack)
    assert [(n, unit) for n, unit in told(text) if n not in GIVEN.get(name, {}) and not is_backed(n, unit, known)] == []


def metrics(name, file, machine="linux-x86_64-cpu"):
    """What the script of one recorded run measured."""
    path = RESULTS / machine / name / file
    return json.loads(path.read_text())["predicate"]["reproducer"]["metrics"]


def test_the_table_of_pack28_is_of_its_releases():
    """One row for each part: the pinned release's mean and standard error, on a CPU and an H200, the mean and range of all; and the outliers.

    The linear layers are repro.py's row, the others parts.py's.
    """
    pack = find("pack28")

    def every_part(name, machine="linux-x86_64-cpu"):
        off = metrics(pack.name, name, machine).get("all linear layers")
        if not off:
            return {}
        linears = {"mean": statistics.mean(off), "standard error": statistics.stdev(off) / len(off) ** 0.5}
        return {**metrics(pack.name, name.replace(".json", ".parts.json"), machine), "all linear layers": linears}

    folder = RESULTS / "linux-x86_64-cpu" / pack.name
    found = {path.name: told for path in folder.glob("torchao-*.unpatched.json") if (told := every_part(path.name))}
    pinned = found[f"torchao-{pack.pinned[0]}.unpatched.json"]
    every = [*{tuple(told["fp32"]): told for told in found.values()}.values()]  # of releases of one text, one
    readme = (pack.folder / "README.md").read_text().replace("−", "-")
    gpu = every_part(f"torchao-{pack.pinned[0]}.unpatched.json", "linux-x86_64-nvidia-h200")
    measured = r"(-?[\d.]+) ± ([\d.]+) \| "
    row = rf"^\| ([\w, ]+?)(?: \(\[repro.py\].*?\))? \| {measured}{measured}(-?[\d.]+) \((-?[\d.]+) – (-?[\d.]+)\) \| (\d+) \|$"
    written = re.findall(row, readme, re.MULTILINE)
    names = {
        "all parts": "all",
        "linear layers alone": "all linear layers",
        "scan, its linear layers": "scan",
        "scan, its state and input": "state",
    }
    assert {names.get(part, part) for part, *_ in written} == set(pinned) - {"fp32"}
    for part, *numbers in written:
        part = names.get(part, part)
        means = [told[part]["mean"] for told in every]
        beyond = sum(told[part]["mean"] > 2 * told[part]["standard error"] for told in every)
        want = (
            pinned[part]["mean"],
            pinned[part]["standard error"],
            gpu[part]["mean"],
            gpu[part]["standard error"],
            sum(means) / len(means),
            min(means),
            max(means),
            beyond,
        )
        assert [float(n) for n in numbers] == pytest.approx(want, abs=5.1e-5), part
    plain = [loss for told in every for loss in told["fp32"]]
    assert f"{min(plain):.1f} – {max(plain):.1f} in fp32" in readme
    assert f"{len(found)} releases" in readme
    assert f"{len(every)} texts" in readme
    scales = metrics(pack.name, f"torchao-{pack.pinned[0]}.unpatched.scales.json")
    for name, *row in re.findall(r"^\| ([\w ×]+?) \| (0\.\d+) \| (0\.\d+) \| (0\.\d+) \|$", readme, re.MULTILINE):
        name = "blocks" if name.startswith("blocks") else name
        places = "nowhere x 1", "tokens x 10000", "channels x 10000"
        for cell, where in zip(row, places, strict=True):
            assert is_backed(cell, None, {scales[f"{name}, outliers in {where}"]["output"]}), (name, where)


def test_the_tables_of_pack27_are_of_its_pinned_release():
    pack = find("pack27")
    readme = (pack.folder / "README.md").read_text()
    names = {"state in bf16": "bf16", "state in e4m3": "e4m3", "state in e5m2": "e5m2", "state thrown away": "thrown away"}
    rows = re.findall(r"^\| ([\w, ]+?) \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$", readme, re.MULTILINE)
    assert len(rows) == 10
    for machine, table in (("linux-x86_64-cpu", rows[:5]), ("linux-x86_64-nvidia-h200", rows[5:])):
        told = metrics(pack.name, f"mamba-ssm-{pack.pinned[0]}.unpatched.length.json", machine)
        for name, *row in table:
            found = [told[f"forgets {rate} a token"][names.get(name, name)] for rate in ("0.1", "0.01", "0.001")]
            for cell, value in zip(row, [*(each["all"] for each in found), found[-1]["by eighth"][-1]], strict=True):
                assert is_backed(cell, "%", {value}), (name, cell, value)


def test_a_number_that_no_run_gave_is_found():
    known = {0.2779, 1399.0 * 2**20}
    assert is_backed("0.278", None, known)
    assert is_backed("27.8", "%", known)
    assert is_backed("1399", "MiB", known)
    assert not is_backed("0.279", None, known)
    assert list(told("off by 0.28 in 0.8.2, `0.5`, [0.7](x) and 3 ranks at 12 GiB, 1.5e-3")) == [
        ("0.28", None),
        ("12", "GiB"),
        ("1.5e-3", None),
    ]
