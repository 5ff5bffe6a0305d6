"""No value that is not a finite number passes a check, and none gets into a stored file."""

import json
import math

import pytest
from helpers import FACTS, judged, make_log

from common.errors import UserError
from common.store import receipt
from common.store.grade import grade

pytestmark = pytest.mark.hostile

CONTROL, TRIGGER = FACTS["checks"][:2]
RIGHT = judged(TRIGGER, error=1e-7)
NOT_NUMBERS = ["NaN", "Infinity", "-Infinity", "null", "1e999"]


def log_with(*checks, verdict="ABSENT", side="patched", metrics="{}"):
    """A log whose JSON line is written by hand, for NaN is no JSON that json.dumps should write."""
    root = "<overlay>" if side == "patched" else "<release>"
    listed = ", ".join(checks)
    line = (
        f'{{"report": 1, "evidence": "interpreter", "file": "{root}/toy/__init__.py", "version": "1.0", '
        f'"verdict": "{verdict}", "checks": [{listed}], "metrics": {metrics}}}'
    )
    word, code = {"ABSENT": ("FIX_VALIDATED" if side == "patched" else "BUG_ABSENT", 0), "REPRODUCED": ("BUG_REPRODUCED", 10)}[
        verdict
    ]
    return make_log(body=[line, word], exit=code, side=side)


def test_the_form_itself_is_sound():
    assert grade(log_with(json.dumps(CONTROL), json.dumps(RIGHT))).outcome == "ABSENT"


@pytest.mark.parametrize("value", NOT_NUMBERS)
@pytest.mark.parametrize("role", ["trigger", "control"])
def test_an_error_that_is_not_finite_never_validates_a_fix(role, value):
    for ok in ("true", "false"):
        bad = f'{{"role": "{role}", "name": "dH", "error": {value}, "limit": 1e-5, "ok": {ok}}}'
        verdict = grade(log_with(json.dumps(CONTROL), json.dumps(RIGHT), bad))
        assert verdict.outcome == "ERROR", verdict


@pytest.mark.parametrize("ok", ["true", "false"])
@pytest.mark.parametrize("role", ["trigger", "control"])
def test_a_check_without_a_value_has_failed(role, ok):
    bad = f'{{"role": "{role}", "name": "dH", "limit": 1e-5, "ok": {ok}}}'
    assert grade(log_with(json.dumps(CONTROL), json.dumps(RIGHT), bad)).outcome == "ERROR"


@pytest.mark.parametrize("limit", ["NaN", "Infinity", "null", "0", "-1", '"1"', "true"])
def test_a_limit_that_nothing_can_exceed_is_no_check(limit):
    bad = f'{{"role": "trigger", "name": "dH", "error": 0.0, "limit": {limit}, "ok": true}}'
    assert grade(log_with(json.dumps(CONTROL), bad)).outcome == "ERROR"


@pytest.mark.parametrize("ok", ["null", "NaN", "1", "1.0", '"yes"', "[]", "[true]"])
def test_a_statement_that_is_neither_true_nor_false_is_no_check(ok):
    for role in ("trigger", "control", "signature"):
        bad = f'{{"role": "{role}", "name": "x", "ok": {ok}}}'
        assert grade(log_with(json.dumps(CONTROL), json.dumps(RIGHT), bad)).outcome == "ERROR"


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_metrics_keep_no_number_that_json_does_not_know(value, tmp_path, store):
    log = log_with(
        json.dumps(CONTROL),
        json.dumps(TRIGGER),
        verdict="REPRODUCED",
        side="unpatched",
        metrics=f'{{"a": {{"b": [1, {value}]}}}}',
    )
    metrics = grade(log).metrics
    assert metrics["a"]["b"][1] is None
    path = store(tmp_path, log=log.replace('"version": "1.0"', '"version": "0.7.0"'))
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))


def test_a_receipt_with_nan_is_never_written(tmp_path, store):
    path = store(tmp_path)
    document = receipt.read(path)
    document.facts.metrics = {"x": math.nan}
    cell = document.cell
    with pytest.raises((ValueError, UserError)):
        receipt.write(tmp_path, cell, "x", document, machine="test-machine")
    assert "NaN" not in path.read_text()


def test_a_toy_whose_result_is_not_a_number(wheels, index, run):
    rows, _ = run(index.add(wheels["0.3"]))
    assert rows[0].verdict.outcome == "ERROR"


def test_a_role_that_nobody_knows_is_no_check():
    bad = '{"role": "contrl", "name": "dH", "error": 1e-9, "limit": 1e-5, "ok": true}'
    assert grade(log_with(json.dumps(CONTROL), json.dumps(RIGHT), bad)).outcome == "ERROR"


@pytest.mark.parametrize("evidence", ["device:<img src=x>", "source:@x", "device:", "device:sm_90 x", "certain"])
def test_an_evidence_level_is_one_of_ours(evidence):
    assert grade(make_log({**FACTS, "evidence": evidence}).replace("triton-interpreter", "device")).outcome == "ERROR"


@pytest.mark.parametrize(
    "broken",
    [
        make_log(stopped={}),
        make_log()
        .replace('"arguments"', '"gpus": 5, "arguments"')
        .replace('"interpreter"', '"device:sm_90"')
        .replace("triton-interpreter", "device"),
        make_log().replace('"arguments"', '"patch": "x", "arguments"'),
        make_log({**FACTS, "claims": 5}),
        make_log().replace('"error": 0.5', f'"error": 1{"0" * 400}'),
        make_log().replace('"metrics": {}', '"metrics": ' + '{"a":' * 700 + "1" + "}" * 700),
    ],
    ids=["stopped", "gpus", "patch", "claims", "a long number", "deep"],
)
def test_grade_never_raises(broken):
    assert grade(broken).outcome in ("ERROR", "REPRODUCED")
