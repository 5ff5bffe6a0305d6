"""A verdict rests on three proofs; a log that disagrees with itself is an ERROR, never a pass."""

import json

import pytest
from helpers import FACTS, judged, make_log
from hypothesis import given
from hypothesis import strategies as st

from common.store.grade import EXIT, grade

FIXED = {
    **FACTS,
    "verdict": "ABSENT",
    "checks": [FACTS["checks"][0], judged(FACTS["checks"][1], error=2e-7)],
}
FINAL = ("REPRODUCED", "ABSENT")


def with_checks(*checks, verdict="REPRODUCED"):
    return {**FACTS, "verdict": verdict, "checks": [judged(check) for check in checks]}


CONTROL, TRIGGER, SIGNATURE = FACTS["checks"]


def test_sound_log_is_reproduced_with_its_three_proofs():
    verdict = grade(make_log())
    assert verdict.outcome == "REPRODUCED"
    assert verdict.evidence == "interpreter"
    assert (verdict.bug_error, verdict.limit, verdict.control_error) == (0.5, 1e-5, 1e-7)
    assert set(verdict.proofs) == {"trigger", "control", "agreement"}


def test_absent_and_fix_validated():
    assert grade(make_log(FIXED, sentinel="BUG_ABSENT", exit=0)).outcome == "ABSENT"
    patched = {**FIXED, "file": "<overlay>/toy/__init__.py"}
    assert grade(make_log(patched, sentinel="FIX_VALIDATED", exit=0, side="patched")).outcome == "ABSENT"


@pytest.mark.parametrize(
    "log",
    [
        pytest.param(make_log(exit=0), id="exit disagrees"),
        pytest.param(make_log(exit=1), id="exit 1"),
        pytest.param(make_log(sentinel="BUG_ABSENT", exit=0), id="json disagrees"),
        pytest.param(make_log(sentinel="FIX_VALIDATED", exit=0), id="patched word on the unpatched side"),
        pytest.param(make_log({**FACTS, "version": "2.0"}), id="another version ran"),
        pytest.param(make_log({**FACTS, "file": "/somewhere/else.py"}), id="imported from elsewhere"),
        pytest.param(make_log({**FACTS, "file": "<overlay>/toy.py"}), id="overlay on the unpatched side"),
        pytest.param(make_log(with_checks(CONTROL)), id="no trigger"),
        pytest.param(make_log(with_checks(TRIGGER, SIGNATURE)), id="no control"),
        pytest.param(make_log(with_checks({**CONTROL, "error": 1.0}, TRIGGER)), id="control failed"),
        pytest.param(make_log(with_checks(CONTROL, TRIGGER, {**SIGNATURE, "ok": False})), id="another signature"),
        pytest.param(make_log(with_checks(CONTROL, {**TRIGGER, "error": 1e-7})), id="the numbers do not show it"),
        pytest.param(make_log(with_checks(CONTROL, {**TRIGGER, "limit": -1})), id="negative limit"),
        pytest.param(make_log(with_checks(CONTROL, {**TRIGGER, "limit": "x"})), id="limit is no number"),
        pytest.param(make_log(with_checks(CONTROL, {"role": "trigger", "name": "n"})), id="neither error nor ok"),
        pytest.param(make_log({**FACTS, "evidence": "device:sm_90"}), id="device evidence from a CPU lane"),
        pytest.param(make_log({**FACTS, "evidence": "certain"}), id="unknown evidence"),
        pytest.param(make_log(body=["BUG_REPRODUCED"]), id="no JSON line"),
        pytest.param(make_log(body=[json.dumps(FACTS)] * 2 + ["BUG_REPRODUCED"]), id="two JSON lines"),
        pytest.param(make_log(body=[json.dumps(FACTS), "BUG_REPRODUCED", "BUG_REPRODUCED"]), id="two sentinels"),
        pytest.param(make_log(body=[json.dumps(FACTS), "BUG_ABSENT", "BUG_REPRODUCED"]), id="contradicting sentinels"),
        pytest.param(make_log(exit=None, signal="SIGSEGV"), id="sentinel, then a crash"),
        pytest.param(make_log(body=[]), id="nothing printed"),
        pytest.param(make_log({**FACTS, "file": "<release>/../evil.py"}), id="imported from beside the release"),
        pytest.param(make_log({**FACTS, "evidence": "emulated"}), id="not the release's own code"),
        pytest.param(make_log(with_checks(CONTROL, {**TRIGGER, "name": "\u200b"})), id="a name that cannot be seen"),
        pytest.param(make_log(FIXED, sentinel="BUG_ABSENT", exit=False), id="an exit code that is no number"),
        pytest.param("", id="empty"),
        pytest.param("BUG_REPRODUCED\n", id="sentinel alone"),
        pytest.param(make_log().rsplit("\n", 2)[0], id="truncated"),
    ],
)
def test_a_log_that_disagrees_with_itself_is_an_error(log):
    verdict = grade(log)
    assert verdict.outcome == "ERROR"
    assert verdict.reason


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (make_log(body=["Traceback …", "ModuleNotFoundError: No module named 'x'"], exit=1), "UNTESTABLE: import"),
        (make_log(body=["torch.OutOfMemoryError: CUDA out of memory"], exit=1), "UNTESTABLE: oom"),
        (make_log(body=[], exit=None, stopped="timeout"), "UNTESTABLE: timeout"),
        (make_log(body=[], exit=None, stopped="memory"), "UNTESTABLE: oom"),
        (make_log(body=[], exit=None, stopped="anchor"), "UNTESTABLE: anchor"),
        (make_log(body=[], exit=None, stopped="install"), "UNTESTABLE: install"),
        (make_log(body=[], exit=None, signal="SIGKILL"), "INFRA: SIGKILL"),
        (make_log(body=[], exit=None, signal="SIGSEGV"), "CHANGED: SIGSEGV"),
        (make_log(body=["UNTESTABLE: no-device"], exit=125), "UNTESTABLE: no-device"),
        (make_log({**FACTS, "verdict": "CHANGED"}, sentinel="CHANGED: scalar", exit=125), "CHANGED: scalar"),
        (make_log(with_checks(CONTROL, {**TRIGGER, "error": 5e-5})), "UNTESTABLE: margin"),
        (make_log(with_checks({**CONTROL, "error": 5e-6}, TRIGGER)), "UNTESTABLE: margin"),
    ],
)
def test_other_endings(log, expected):
    assert str(grade(log)) == expected


def test_a_result_that_is_not_finite_is_the_bug():
    verdict = grade(make_log(with_checks(CONTROL, {**TRIGGER, "error": None})))
    assert verdict.outcome == "REPRODUCED"
    assert verdict.bug_error is None
    assert "none" in verdict.failed


@given(st.text())
def test_any_text_is_graded_and_none_passes(text):
    assert grade(text).outcome == "ERROR"


@given(
    st.lists(st.text(alphabet=st.characters(exclude_characters="\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")), max_size=5),
    st.integers(0, 255),
)
def test_no_output_without_the_facts_passes(body, code):
    assert grade(make_log(body=[*body, "BUG_REPRODUCED"], exit=code)).outcome not in FINAL


@given(st.sampled_from(sorted(FACTS)), st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers()), st.booleans()))
def test_facts_changed_anywhere_do_not_pass_as_something_else(key, value):
    """Whatever one key becomes, the verdict is the same as before (the key does not matter) or it is no verdict."""
    verdict = grade(make_log({**FACTS, key: value}))
    assert verdict.outcome in ("REPRODUCED", "ERROR")
    assert verdict.outcome == "ERROR" or key == "metrics" or FACTS[key] == value


@given(
    st.floats(min_value=0, allow_nan=False),
    st.floats(min_value=1e-300, allow_nan=False, allow_infinity=False),
    st.floats(min_value=0, allow_nan=False),
)
def test_margins(bug, limit, control):
    """REPRODUCED only with bug >= 10 x limit >= 100 x control."""
    facts = with_checks({**CONTROL, "error": control, "limit": limit}, {**TRIGGER, "error": bug, "limit": limit})
    if not (bug < float("inf") and control < float("inf")):
        return  # JSON has no infinity; a script writes null
    reproduced = grade(make_log(facts)).outcome == "REPRODUCED"
    assert reproduced == (bug >= 10 * limit and limit >= 10 * control)


def test_exit_codes_are_those_of_git_bisect_run():
    assert EXIT["ABSENT"] == 0
    assert 1 <= EXIT["REPRODUCED"] < 125
    assert EXIT["CHANGED"] == EXIT["UNTESTABLE"] == 125


REPORT = {
    "report": 1,
    "evidence": "interpreter",
    "file": "<release>/toy/__init__.py",
    "version": "1.0",
    "verdict": "ABSENT",
    "metrics": {},
    "checks": [
        {"role": "control", "name": "mean", "error": 1e-7, "limit": 1e-5, "ok": True},
        {"role": "trigger", "name": "dense: bit for bit", "ok": True},
    ],
}


def report(*, sentinel="BUG_ABSENT", exit=0, **changes):
    return grade(make_log({**REPORT, **changes}, sentinel=sentinel, exit=exit))


@pytest.mark.parametrize(
    ("claims", "given"),
    [
        ({}, ()),
        ({"LEGALITY_PROVED": "bit for bit"}, ("LEGALITY_PROVED",)),
        ({"BITWISE_IDENTICAL": "bit for bit"}, ()),  # of an interpreter, which may compute in another dtype
        (["BITWISE_IDENTICAL"], None),
        ({"BITWISE_IDENTICAL": "no such check"}, None),
        ({"PERFECT": "mean"}, None),
    ],
)
def test_a_claim_rests_on_checks(claims, given):
    verdict = report(claims=claims)
    assert (verdict.outcome, verdict.claims) == (("ABSENT", given) if given is not None else ("ERROR", ()))


def test_a_claim_is_none_where_the_fix_is_wrong():
    checks = [REPORT["checks"][0], {**REPORT["checks"][1], "ok": False}]
    claims = {"BITWISE_IDENTICAL": "bit for bit"}
    verdict = report(checks=checks, claims=claims, verdict="REPRODUCED", sentinel="BUG_REPRODUCED", exit=10)
    assert (verdict.outcome, verdict.claims) == ("REPRODUCED", ())


@pytest.mark.parametrize(
    ("errors", "outcome"),
    [
        # (error, limit) of each trigger: each is held against its own limit.
        ([(1e-2, 1e-5), (5e-2, 1e-1)], "REPRODUCED"),
        ([(1.5e-5, 1e-5), (5e-2, 1e-1)], "UNTESTABLE: margin"),
        ([(9e-6, 1e-5), (5e-2, 1e-1)], "ABSENT"),
    ],
)
def test_a_margin_is_that_of_the_check_which_failed(errors, outcome):
    triggers = [{"role": "trigger", "name": f"{e}", "error": e, "limit": limit, "ok": e <= limit} for e, limit in errors]
    wrong = not all(t["ok"] for t in triggers)
    how = {"verdict": "REPRODUCED", "sentinel": "BUG_REPRODUCED", "exit": 10} if wrong else {}
    assert str(report(checks=[REPORT["checks"][0], *triggers], **how)) == outcome


def test_a_statement_that_failed_shows_the_bug_however_near_its_limit_a_number_is():
    near = {"role": "trigger", "name": "the other rows", "error": 3e-5, "limit": 1e-5, "ok": False}
    refused = {"role": "trigger", "name": "a label of V is refused", "ok": False}
    how = {"verdict": "REPRODUCED", "sentinel": "BUG_REPRODUCED", "exit": 10}
    verdict = report(checks=[REPORT["checks"][0], near, refused], **how)
    assert (str(verdict), verdict.bug_error, verdict.limit) == ("REPRODUCED", None, 1e-5)
    far = {**REPORT["checks"][0], "error": 9e-6}
    assert str(report(checks=[far, near, refused], **how)) == "UNTESTABLE: margin"


def test_what_was_not_run_gives_no_verdict_of_its_own():
    for word, outcome in (("UNTESTABLE", "UNTESTABLE"), ("ABSENT", "ERROR"), ("REPRODUCED", "ERROR")):
        assert grade(make_log(body=[], exit=None, stopped="skipped", verdict=word)).outcome == outcome


def test_untestable_beside_another_word_in_the_json_line_is_an_error():
    assert report(sentinel="UNTESTABLE: no-api", exit=125).outcome == "ERROR"
    assert str(report(verdict="UNTESTABLE", sentinel="UNTESTABLE: no-api", exit=125)) == "UNTESTABLE: no-api"


def test_measured_needs_a_number():
    for metrics, outcome in (({"ms": {"a": [1.5]}}, "MEASURED"), ({"a": None, "b": "x", "c": True}, "ERROR"), ({}, "ERROR")):
        assert report(verdict="MEASURED", metrics=metrics, sentinel="MEASURED").outcome == outcome


def test_a_script_that_dies_before_its_first_check_is_changed_not_an_error_of_ours():
    facts = {"report": 1, "evidence": "none", "metrics": {}, "checks": [], "verdict": "CHANGED"}
    verdict = grade(make_log(facts, sentinel="CHANGED: AssertionError", exit=125))
    assert str(verdict) == "CHANGED: AssertionError"


@pytest.mark.parametrize(
    "changes",
    [
        {"error": 0.5, "ok": True},
        {"error": 1e-9, "ok": False},
        {"error": 1e-9, "ok": 1},
        {"error": 1e-9, "ok": "yes"},
        {"error": 1e-9, "ok": True, "role": "triger"},
        {"error": 1e-9, "ok": True, "name": " "},
        {"error": -1.0, "ok": True},
    ],
)
def test_a_check_that_contradicts_itself_is_an_error(changes):
    checks = [*REPORT["checks"], {"role": "trigger", "name": "dH", "limit": 1e-5, **changes}]
    assert report(checks=checks).outcome == "ERROR"


def test_a_claim_rests_on_no_check_that_failed_and_bits_on_none_with_a_limit():
    failed = [*REPORT["checks"], {"role": "signature", "name": "in bits", "ok": False}]
    assert report(checks=failed, claims={"LEGALITY_PROVED": "in bits"}).outcome == "ERROR"
    assert report(claims={"BITWISE_IDENTICAL": "mean"}).outcome == "ERROR"


def test_measured_with_something_that_is_not_right_is_an_error():
    wrong = [{**REPORT["checks"][1], "ok": False}]
    assert report(verdict="MEASURED", metrics={"ms": 1.5}, checks=wrong, sentinel="MEASURED").outcome == "ERROR"


@pytest.mark.parametrize(
    ("lane", "evidence", "sound"),
    [
        ("triton-interpreter", "interpreter", True),
        ("triton-interpreter-ptx", "source", True),
        ("triton-interpreter", "codegen", False),
        ("triton-interpreter", "device:cpu", False),
        ("te-cpu", "interpreter", False),
        ("tilelang-codegen", "codegen", True),
        ("cpu", "device:cpu", True),
        ("cpu", "codegen", False),
        ("device", "device:cpu", False),
        ("device", "device:sm_90", True),
        ("of-my-own", "source", False),
    ],
)
def test_a_level_is_one_that_the_lane_leaves(lane, evidence, sound):
    log = make_log({**REPORT, "evidence": evidence}, sentinel="BUG_ABSENT", exit=0).replace("triton-interpreter", lane, 1)
    assert (grade(log).outcome == "ABSENT") == sound


def of_both(first=None, second=None, *, code=0, word="FIX_VALIDATED", lines=2, **opening):
    """A log of repro.py and validate.py, with changes of what each says."""
    there = {**REPORT, "file": "<overlay>/toy/__init__.py"}
    body = [json.dumps({**there, **(first or {})}), "FIX_VALIDATED"]
    deep = {"exit": code, "signal": None, "stopped": None}
    log = make_log(
        body=[*body, json.dumps({**there, **(second or {})}), word], sentinel="", exit=0, side="patched", validate=deep
    )
    head, rest = log.split("\n", 1)
    asked = json.loads(head)["runner"] | {"validate": True, "lines": lines, **opening}
    return grade(f"{json.dumps({'runner': asked})}\n{rest}")


def test_a_fix_needs_both_scripts():
    assert of_both().outcome == "ABSENT"
    assert of_both(lines=4).outcome == "ERROR"
    assert of_both({"evidence": "source"}, {"evidence": "interpreter"}).evidence == "source"
    assert of_both({"evidence": "interpreter"}, {"evidence": "source"}).evidence == "source"
    # A lane of its own may run validate.py: what one compiles, the other computes.
    assert of_both({"evidence": "codegen"}, {"evidence": "interpreter"}, lane="tilelang-codegen").outcome == "ABSENT"
    assert of_both({"evidence": "interpreter"}, {"evidence": "interpreter"}, lane="tilelang-codegen").outcome == "ERROR"
    untestable = of_both({}, {"verdict": "UNTESTABLE"}, code=125, word="UNTESTABLE: no-device")
    assert str(untestable) == "UNTESTABLE: validate: no-device"
    wrong = [REPORT["checks"][0], {**REPORT["checks"][1], "ok": False}]
    found = of_both({}, {"checks": wrong, "verdict": "REPRODUCED"}, code=10, word="BUG_REPRODUCED")
    assert (found.outcome, found.reason) == ("CHANGED", "validate: dense: bit for bit")


def test_of_both_scripts_the_number_that_is_nearer_to_its_limit_is_told():
    near = [REPORT["checks"][0], {"role": "trigger", "name": "n", "error": 9e-6, "limit": 1e-5, "ok": True}]
    assert of_both({}, {"checks": near}).bug_error == 9e-6
    assert of_both({"checks": near}).bug_error == 9e-6


def test_a_fix_is_held_to_as_many_triggers_as_ran_without_it():
    assert of_both(triggers=1).outcome == "ABSENT"
    assert of_both(triggers=2).outcome == "ERROR"


def test_a_diff_is_held_to_as_many_checks_of_validate_as_the_packs_own_fix():
    assert of_both(checks=2).outcome == "ABSENT"
    assert str(of_both(checks=3)) == "CHANGED: validate: 2 checks ran, and 3 do with the pack's own fix"
    assert str(of_both(checks=0, own="CHANGED")) == "UNTESTABLE: not-compared (the pack's own fix is CHANGED here)"


@pytest.mark.parametrize(
    ("unpatched", "validate", "outcome"),
    [
        ("REPRODUCED", True, "ABSENT"),
        ("REPRODUCED", False, "UNTESTABLE: not-validated"),
        ("ABSENT", True, "NOTHING_TO_FIX"),
        ("CHANGED", True, "UNTESTABLE: unpatched (CHANGED)"),
    ],
)
def test_somebodys_diff_is_certified_by_a_deep_check_of_a_release_that_has_the_bug(unpatched, validate, outcome):
    log = make_log({**FIXED, "file": "<overlay>/toy.py"}, sentinel="FIX_VALIDATED", exit=0, side="patched").splitlines()
    opening, closing = json.loads(log[0]), json.loads(log[-1])
    opening["runner"]["patch"] = {"name": "x.diff", "sha256": "0" * 64, "unpatched": unpatched}
    body = log[1:-1]
    if validate:
        opening["runner"] |= {"validate": True, "lines": len(body)}
        closing["runner"]["validate"] = dict(closing["runner"])
        body = [*body, *body]
    verdict = grade("\n".join([json.dumps(opening), *body, json.dumps(closing)]) + "\n")
    assert str(verdict).startswith(outcome)
    if verdict.outcome == "ABSENT":
        opening["runner"]["lines"] = -len(body) // 2
        assert grade("\n".join([json.dumps(opening), *body, json.dumps(closing)]) + "\n").outcome == "ERROR"
