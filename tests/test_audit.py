"""What is stored can be looked at again: graded by today's rules, and checked to be what it says it is."""

import json
import shutil

import pytest
from helpers import ROOT

from common.cli import run
from common.errors import UserError
from common.packs.pack import find
from common.run.plan import planned
from common.store import audit, receipt


@pytest.fixture
def published(monkeypatch, tmp_path):
    """An index that publishes liger-kernel 0.7.0 with the hash that the fixture's receipts have."""
    release = audit.releases.Release(version="0.7.0", file="wheel", sha256="0" * 64)
    monkeypatch.setattr(audit.releases, "releases", lambda package, cache, index=None: ([release], None))
    return audit.Published(tmp_path)


def change(path, **facts):
    document = json.loads(path.read_text())
    document["predicate"]["reproducer"].update(facts)
    path.write_text(json.dumps(document))


def test_a_verdict_that_was_edited_by_hand_is_reported(tmp_path, store):
    path = store(tmp_path)
    assert list(audit.regrade(path)) == []
    change(path, outcome="ABSENT", bug_error=1e-9)
    found = list(audit.regrade(path))
    assert len(found) == 2
    assert "outcome was 'ABSENT', and is 'REPRODUCED'" in found[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["predicate"]["reproducer"].update(started="1999-99-99T99:99:99Z"), "which is no time"),
        (lambda d: d["predicate"]["reproducer"].update(command=["rm"]), "its command is rm"),
        (lambda d: d["subject"][0].update(name="evil-1.0.whl"), "not one of liger-kernel"),
        (lambda d: env(d).update(torch="9.9.9"), "it ran with torch 9.9.9, and its environment holds 2.13.0"),
        (
            lambda d: env(d)["distributions"][0].update(version="9.0"),
            "it is of liger-kernel 0.7.0, and its environment holds 9.0",
        ),
    ],
    ids=["time", "command", "file", "torch", "another release"],
)
def test_a_receipt_that_contradicts_itself_is_reported(tmp_path, store, change, said):
    path = store(tmp_path)
    document = json.loads(path.read_text())
    held = [{"name": n, "version": v, "record_sha256": "0" * 64} for n, v in (("liger-kernel", "0.7.0"), ("torch", "2.13.0"))]
    env(document).update(torch="2.13.0", distributions=held)
    path.write_text(json.dumps(document))
    assert list(audit.regrade(path)) == []
    change(document)
    path.write_text(json.dumps(document))
    assert any(said in problem for problem in audit.regrade(path))


def env(document):
    return document["predicate"]["reproducer"]["environment"]


def test_what_one_file_installed_is_the_same_in_all_its_receipts(tmp_path, store, published):
    paths = [store(tmp_path, machine=machine) for machine in ("a", "b")]
    for path, digest in zip(paths, ("1", "2"), strict=True):
        document = json.loads(path.read_text())
        document["subject"][0]["name"] = "liger_kernel-0.7.0-py3-none-any.whl"
        env(document)["distributions"] = [{"name": "liger-kernel", "version": "0.7.0", "record_sha256": digest * 64}]
        path.write_text(json.dumps(document))
    said = "of this file of liger-kernel 0.7.0, records say that it installed different files"
    assert said in list(audit.verify(paths[0], published, known=audit.Known(results=tmp_path)))


def test_a_sound_receipt(tmp_path, store, published):
    assert list(audit.verify(store(tmp_path), published)) == []


def test_a_wheel_that_the_index_does_not_publish(tmp_path, store, published):
    path = store(tmp_path)
    path.write_text(path.read_text().replace("0" * 64, "1" * 64, 1))
    document = json.loads(path.read_text())
    document["subject"][0]["digest"]["sha256"] = "1" * 64
    path.write_text(json.dumps(document))
    assert "the index publishes 000000000000" in next(audit.verify(path, published))


def test_another_name_than_it_says(tmp_path, store, published):
    path = store(tmp_path)
    other = path.with_name("liger-kernel-0.8.0.unpatched.json")
    path.rename(other)
    with pytest.raises(UserError, match="is of pack09/liger-kernel-0"):
        list(audit.verify(other, published))


@pytest.mark.parametrize("planted", ["/home/jdoe/x", "ghp_" + "a" * 36, "https://me:secret@index.example/"])
def test_something_private(tmp_path, store, published, planted):
    path = store(tmp_path)
    change(path, command=["python", planted])
    assert "its receipt holds something private" in list(audit.verify(path, published))


def test_one_that_cannot_be_read_does_not_stop_the_others(tmp_path, store):
    store(tmp_path, version="0.6.5").write_text("{")
    store(tmp_path, version="0.7.0")
    found = list(audit.problems(tmp_path, receipt.stored(tmp_path), audit.regrade))
    assert [bool(problems or why) for path, problems, why in found if path.suffix == ".json"] == [True, False]
    assert found[0][1] == [] and "not whole JSON" in found[0][2]


def test_copies_and_reviews_are_not_records(tmp_path, store):
    store(tmp_path)
    (tmp_path / "attach" / "pack09").mkdir(parents=True)
    (tmp_path / "attach" / "pack09" / "x.json").write_text("{}")
    assert len(receipt.stored(tmp_path)) == 1


def test_no_index_is_a_warning(tmp_path, store, monkeypatch):
    def refuse(package, cache, index=None):
        raise UserError("The package index did not answer.")

    monkeypatch.setattr(audit.releases, "releases", refuse)
    published = audit.Published(tmp_path)
    assert list(audit.verify(store(tmp_path), published)) == []
    assert "are not checked" in published.warnings[0]


def test_the_commands(cli, tmp_path, store):
    path = store(tmp_path / "results")
    done = cli("regrade", "--results", tmp_path / "results")
    assert (done.returncode, done.stdout) == (0, "1 receipts, 0 graded differently today.\n")
    change(path, outcome="ABSENT")
    done = cli("regrade", "--results", tmp_path / "results")
    assert done.returncode == 1
    assert "outcome was" in done.stdout
    done = cli("verify", "--results", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "is not a folder" in done.stderr


def test_a_timeline_that_the_receipts_do_not_give_is_told(cli, tmp_path, store):
    """check and pins read nothing else."""
    store(tmp_path / "results")
    (tmp_path / "results" / "timeline.json").write_text("{}\n")
    done = cli("verify", "--results", tmp_path / "results")
    assert done.returncode == 1
    assert "timeline.json is not what the receipts give" in done.stderr
    (tmp_path / "results" / "timeline.json").unlink()
    (tmp_path / "results" / "badges").mkdir()
    (tmp_path / "results" / "badges" / "torch.svg").write_text("<svg/>")
    assert "torch.svg is not what the receipts give" in cli("verify", "--results", tmp_path / "results").stderr


def test_schema_of_every_stored_receipt():
    for path in receipt.stored(ROOT / "results"):
        receipt.read_log(path, receipt.read(path))


def test_kept_reviews_are_read_and_not_counted():
    """Receipts of a diff are about the diff: regrade looks at them, and the release's record does not have them."""
    found = receipt.reviews(ROOT / "results")
    assert {"pr1126", "pr1298"} <= {folder.name for folder in found}
    kept = [path for folder in found for path in receipt.stored(folder)]
    assert kept and not set(kept) & set(receipt.stored(ROOT / "results"))
    assert all(not list(audit.regrade(path)) for path in kept)
    diffs = [path for path in kept if ".patched." in path.name and "commits" not in path.parts]
    assert diffs and all(receipt.read(path).facts.patch for path in diffs)


def of_another_file(path, **digest):
    document = json.loads(path.read_text())
    document["subject"][0]["digest"] = digest
    path.write_text(json.dumps(document))
    return path


def test_what_is_no_file_of_the_index_is_no_record(tmp_path, store, published):
    """An installed release, a version that was never published, a wheel that somebody made: below review/ alone."""
    installed = of_another_file(store(tmp_path), record_sha256="2" * 64)
    unknown = store(tmp_path, version="0.8.99")
    local = store(tmp_path, version="0.7.0+x.tree.y")
    for path, said in (
        (installed, "made of an installed release"),
        (unknown, "the index has no liger-kernel 0.8.99"),
        (local, "no release and no commit that pack09 names"),
    ):
        assert said in " ".join(audit.verify(path, published))
        assert list(audit.verify(path, published, reviewed=True)) == []


def test_a_commit_is_the_one_that_its_pack_names(tmp_path, store, published):
    commit = "a" * 40
    known = audit.Known({("pack09", ""): f"pkg:github/toy/toy@{commit}"})
    path = store(tmp_path, version=f"0+git.{commit[:10]}.tree.0123456789")
    document = json.loads(path.read_text())
    for uri, said in (
        (f"pkg:github/evil/fork@{commit}", "and pack09 names pkg:github/toy/toy@"),
        (f"pkg:github/toy/toy@{commit}", ""),
    ):
        document["subject"][0]["uri"] = uri
        path.write_text(json.dumps(document))
        problems = " ".join(audit.verify(path, published, known=known))
        assert said in problems if said else problems == ""


def test_a_fix_of_a_pack_with_a_deep_check_went_through_it(tmp_path, store, published):
    found = find_patched()
    assert list(audit.regrade(found)) == []
    copy = tmp_path / "results" / found.parent.parent.name / found.parent.name / found.name
    copy.parent.mkdir(parents=True)
    shutil.copy(found.parent.parent / "machine.json", copy.parent.parent)
    document = receipt.read(found)
    log = receipt.read_log(found, document)
    lines = log.splitlines()
    opening, closing = json.loads(lines[0]), json.loads(lines[-1])
    lines = lines[1 : 1 + opening["runner"]["lines"]]
    for name in ("validate", "lines"):
        opening["runner"].pop(name)
    closing["runner"].pop("validate")
    text = "\n".join([json.dumps(opening), *lines, json.dumps(closing)]) + "\n"
    name, sha256 = receipt.log_name(document.cell, text)
    (copy.parent / name).write_text(text)
    raw = json.loads(found.read_text())
    raw["predicate"]["reproducer"]["log"] = {"name": name, "sha256": sha256, "cut": 0}
    copy.write_text(json.dumps(raw))
    assert any("by repro.py alone" in problem for problem in audit.regrade(copy))
    # One that does not even name validate.py is found by who knows that its pack has one.
    raw["predicate"]["configuration"] = [c for c in raw["predicate"]["configuration"] if c["name"] != "validate.py"]
    copy.write_text(json.dumps(raw))
    assert not any("by repro.py alone" in problem for problem in audit.regrade(copy))
    for unchecked, sound in (({("pack09", "")}, True), (set(), False)):
        problems = list(audit.verify(copy, published, known=audit.Known(unchecked=unchecked)))
        assert any("which its pack has" in problem for problem in problems) != sound


def find_patched():
    """A stored receipt of pack09's fix."""
    return next((ROOT / "results" / "linux-x86_64-cpu" / "pack09").glob("liger-kernel-0.7.0.patched.json"))


def test_an_installed_release_that_is_the_indexs_own_may_be_a_record(tmp_path, store, published):
    """A GPU machine without an index: its RECORD is that of a run of the index's file."""
    of_another_file(store(tmp_path, machine="gpu"), record_sha256="2" * 64)
    other = store(tmp_path, machine="cpu")
    document = json.loads(other.read_text())
    record = {"name": "liger-kernel", "version": "0.7.0", "record_sha256": "2" * 64}
    document["predicate"]["reproducer"]["environment"]["distributions"] = [record]
    other.write_text(json.dumps(document))
    path = tmp_path / "gpu/pack09/liger-kernel-0.7.0.unpatched.json"
    assert list(audit.verify(path, published, known=audit.Known(results=tmp_path))) == []
    record["record_sha256"] = "3" * 64
    other.write_text(json.dumps(document))
    assert list(audit.verify(path, published, known=audit.Known(results=tmp_path)))


def test_a_parent_folder_called_review_excuses_nothing(cli, tmp_path, store):
    store(tmp_path / "review" / "results", version="0.8.99")
    done = cli("verify", "--results", tmp_path / "review" / "results")
    assert "the index has no liger-kernel 0.8.99" in done.stdout or "is there a network" in done.stderr


def test_a_record_is_what_record_makes_whatever_the_folder_is_called(cli, tmp_path):
    info = tmp_path / "site" / "megatron_core-0.19.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.2\n")
    (info / "RECORD").write_text("")
    for words, said in (
        (["--release-path", tmp_path / "site", "--results", "results"], "--record keeps what was seen of a release's own file"),
        (["--variant", "d98e8a64dd", "--here"], "is commit d98e8a64dd and nothing else"),
        (["--variant", "d98e8a64dd", "--wheel", "x.whl"], "is commit d98e8a64dd and nothing else"),
    ):
        done = cli("run", "pack29", *words, results=False)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_where_the_index_cannot_be_asked_record_says_what_to_do(monkeypatch, tmp_path):
    def asked(*_, **__):
        raise ModuleNotFoundError("No module named 'requests'", name="requests")

    monkeypatch.setattr(run.releases, "releases", asked)
    plan = planned(find("pack09"), "", "device", here=True, wheels={"0.8.2": tmp_path / "x.whl"})
    with pytest.raises(UserError, match="requests is not installed here: leave --record out"):
        run._of_the_index(plan)
