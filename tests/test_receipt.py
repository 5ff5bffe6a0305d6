"""Receipts are whole or not there, say what they are, and are refused in one sentence when they are not sound."""

import errno
import json
from pathlib import Path

import pytest
from helpers import FACTS, make_log
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.install import lanes, machine
from common.packs.pack import find
from common.store import receipt
from common.store.grade import grade


def folder_state(folder):
    """What a reader finds: every receipt that is there, with its log, sound."""
    found = {}
    for path in sorted(folder.rglob("liger*.json")):
        document = receipt.read(path)
        found[path.name] = receipt.read_log(path, document)
    return found


def test_round_trip(tmp_path, store):
    path = store(tmp_path)
    document = receipt.read(path)
    assert document.facts.outcome == "REPRODUCED"
    assert document.subject[0].uri == "pkg:pypi/liger-kernel@0.7.0"
    assert str(grade(receipt.read_log(path, document))) == "REPRODUCED"
    assert json.loads((tmp_path / "test-machine" / "machine.json").read_text())["schema"] == receipt.SCHEMA


def test_a_second_run_replaces_the_pair_and_leaves_nothing_over(tmp_path, store):
    first = store(tmp_path, log=make_log({**FACTS, "version": "1.0"}))
    second = store(tmp_path)
    assert first == second
    assert len(list(second.parent.iterdir())) == 2


def test_sides_and_versions_do_not_delete_each_others_logs(tmp_path, store):
    for version in ("0.5.1", "0.5.10"):
        for side in ("unpatched", "patched"):
            store(tmp_path, version=version, side=side)
    store(tmp_path, version="0.5.1")
    assert len(folder_state(tmp_path)) == 4


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=["kill", "disk"])
def test_stopped_at_any_step_the_old_pair_or_the_new_one_is_whole(tmp_path, store, monkeypatch, step, error):
    store(tmp_path)
    before = folder_state(tmp_path)
    new_log = make_log({**FACTS, "version": "0.7.0", "metrics": {"new": 1}}).replace('"version": "1.0"', '"version": "0.7.0"')
    new_log = new_log.replace('"dist": "toy"', '"dist": "liger-kernel"')
    calls = 0
    replace, fsync = Path.replace, receipt.write_atomically.__globals__["os"].fsync

    def count(real):
        def wrapped(*arguments):
            nonlocal calls
            calls += 1
            if calls == step + 1:
                raise error
            return real(*arguments)

        return wrapped

    monkeypatch.setattr(Path, "replace", count(replace))
    monkeypatch.setattr("common.files.os.fsync", count(fsync))
    with pytest.raises((KeyboardInterrupt, UserError)) as caught:
        store(tmp_path, log=new_log)
    monkeypatch.undo()
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value)
    assert folder_state(tmp_path) == before
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(list(tmp_path.rglob("*.log"))) == 1
    store(tmp_path, log=new_log)
    assert folder_state(tmp_path) == {"liger-kernel-0.7.0.unpatched.json": new_log}


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, store, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("common.files.tempfile.mkstemp", refuse)
    with pytest.raises(UserError, match="--results"):
        store(tmp_path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "not whole JSON"),
        (lambda text: "", "not whole JSON"),
        (lambda text: "[]", "not valid"),
        (lambda text: text.replace('"schema": 2', '"schema": 99'), "update the checkout"),
        (lambda text: text.replace('"outcome": "REPRODUCED"', '"outcome": "PERFECT"'), "outcome"),
        (lambda text: text.replace('"evidence": "interpreter"', '"evidence": "none"'), "not valid"),
        (lambda text: text.replace('"agreement"', '"agreememt"'), "not valid"),
        (lambda text: text.replace('"side": "unpatched"', '"side": "unpatched", "user": "me"'), "user"),
    ],
)
def test_a_damaged_receipt_is_refused(tmp_path, store, damage, said):
    path = store(tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match=said) as caught:
        receipt.read(path)
    assert path.name in str(caught.value)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_any_cut_of_a_receipt_is_refused_in_a_sentence(tmp_path, store, data):
    path = store(tmp_path)
    text = path.read_text()
    path.write_text(text[: data.draw(st.integers(0, len(text) - 3))])
    with pytest.raises(UserError):
        receipt.read(path)


def test_an_edited_log_is_noticed(tmp_path, store):
    path = store(tmp_path)
    document = receipt.read(path)
    log = path.parent / document.facts.log.name
    log.write_text(log.read_text().replace("0.5", "0.0"))
    with pytest.raises(UserError, match="sha256 differs"):
        receipt.read_log(path, document)
    log.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        receipt.read_log(path, document)


def test_stale_means_the_files_changed(tmp_path, store):
    today = find("pack09").hashes("unpatched", lanes.files("triton-interpreter"))
    assert receipt.read(store(tmp_path)).hashes == today
    assert receipt.read(store(tmp_path, stale=True)).hashes != today


def test_the_fix_does_not_decide_the_unpatched_side():
    pack = find("pack09")
    assert "fix.py" in pack.hashes("patched")
    assert "fix.py" not in pack.hashes("unpatched")


def test_a_fix_that_another_takes_edits_from_decides_too():
    ours, theirs = (find(name).hashes("patched") for name in ("pack11", "pack10"))
    assert ours["pack10/fix.py"] == theirs["fix.py"]
    assert "pack10/fix.py" not in find("pack11").hashes("unpatched")


def test_the_machines_name_is_no_host_name():
    import re
    import socket

    assert re.fullmatch(r"[a-z0-9_-]+", machine.machine_name())
    assert socket.gethostname() not in machine.machine_name()


@pytest.mark.parametrize(
    "text", ['{"x": 1, ', "[1, 2", "12,", '{"subject": 3,\n<<<<<<< HEAD', '{"x":' + "[" * 100_000, '{"subject": 3}']
)
def test_what_is_wrong_before_it_breaks_off_is_one_sentence_too(tmp_path, store, text):
    path = store(tmp_path)
    path.write_text(text)
    with pytest.raises(UserError, match=path.name):
        receipt.read(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("_type",), None),
        (("predicateType",), None),
        (("subject", 0, "digest"), {}),
        (("predicate", "configuration", 0, "digest"), {}),
        (("predicate", "configuration", 0, "digest"), {"record_sha256": "0" * 64}),
        (("predicate", "reproducer", "environment", "gpus"), [{"name": "x"}]),
        (("predicate", "reproducer", "variant"), "a\n"),
        (("predicate", "reproducer", "bug_error"), -1.0),
    ],
)
def test_nothing_is_left_out_and_nothing_else_gets_in(tmp_path, store, place, value):
    path = store(tmp_path)
    document = json.loads(path.read_text())
    *above, last = place
    inner = document
    for key in above:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="is not valid"):
        receipt.read(path)
