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
    "pack09": {"1.12": "202.1 ms beside 180.1 ms", "1.29": "15.2 ms beside 11.8 ms", "4.7e-2": "the article's"},
    "pack19": {"4e36": "printed by a recorded run as the loss of a label of V in the last row"},
    "pack27": {"2.7": "0.072 beside 0.0265"},
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
                    checks = [*said.get("checks", ()), *said.get("comparisons", ())]
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


def test_the_table_of_pack28_is_the_mean_of_its_releases():
    """One row for each part of the model: the mean of all releases, and the least and the largest of their means."""
    pack, off, plain, single = find("pack28"), {}, [], []
    for path in sorted((RESULTS / "linux-x86_64-cpu" / pack.name).glob("*.unpatched.json")):
        log = path.parent / json.loads(path.read_text())["predicate"]["reproducer"]["log"]["name"]
        metrics = next(json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"report"'))["metrics"]
        plain += metrics.pop("fp32", [])
        for part, measured in metrics.items():
            runs = measured["loss more than fp32, by seed"]
            off.setdefault(part, []).append(statistics.mean(runs))
            single += runs if part == "scan" else []
    readme = (pack.folder / "README.md").read_text().replace("−", "-")
    written = re.findall(r"^\| (\w+)(?: parts)? \| (-?[\d.]+) \| (-?[\d.]+) – (-?[\d.]+) \|$", readme, re.MULTILINE)
    assert {part: tuple(map(float, row)) for part, *row in written} == {
        part: tuple(round(each, 4) + 0.0 for each in (statistics.mean(means), min(means), max(means)))
        for part, means in off.items()
    }
    assert f"{len(off['all'])} releases" in readme
    assert f"between {min(single)} and {max(single)}" in readme
    assert f"{min(plain):.1f} – {max(plain):.1f} in fp32" in readme


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
