"""The command as a person meets it: real runs of the self-test's toy releases, and every mistake told in a sentence."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, raw

from common.cli import COMMANDS, main
from common.cli.common import output
from common.errors import UserError
from common.store import receipt


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_the_self_test_gives_each_verdict_for_its_reason(cli, cache, tmp_path):
    done = cli("run", "pack00", cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every verdict is what the pack expects" in done.stdout
    outcomes = {}
    for path in (tmp_path / "results").rglob("reproducer-toy-*.json"):
        facts = raw(path)["predicate"]["reproducer"]
        outcomes[facts["version"], facts["side"]] = facts["outcome"]
    assert outcomes["1.0", "unpatched"] == "REPRODUCED"
    assert outcomes["1.0", "patched"] == "ABSENT"
    assert outcomes["2.0", "patched"] == "NOTHING_TO_PATCH"
    assert {o for (_, side), o in outcomes.items() if side == "unpatched"} == {
        "REPRODUCED",
        "ABSENT",
        "CHANGED",
        "UNTESTABLE",
        "ERROR",
    }
    assert len(outcomes) == 2 * 17 - 2, "a run that says nothing of its release leaves no receipt"


def test_the_three_proofs_and_the_evidence_are_printed(cli, cache):
    done = cli("run", "pack00", "--release", "1.0", cache=cache)
    assert "BUG_REPRODUCED (evidence: source)" in done.stdout
    assert "FIX_VALIDATED (evidence: source)" in done.stdout
    for proof in ("1. trigger", "2. control", "3. agreement"):
        assert done.stdout.count(proof) == 2
    assert "pack00/RELEASE.SIDE.json" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_fix_without_one_of_its_transforms_is_red(cli, cache, tmp_path):
    done = cli("run", "pack00", "--release", "1.0", "--without", "sum", cache=cache)
    assert done.returncode == 1
    assert "1.0 patched: expected FIX_VALIDATED (the fix works), saw BUG_REPRODUCED" in " ".join(done.stdout.split())
    assert not list((tmp_path / "results").glob("*/pack00/*")), "such runs are no record of the release"
    assert list((tmp_path / "results" / "review" / "without-sum").glob("*/pack00/*.json"))


def test_somebody_elses_diff_is_judged_on_both_sides(cli, cache, tmp_path):
    diff = "--- a/reproducer_toy/__init__.py\n+++ b/reproducer_toy/__init__.py\n@@ -1,2 +1,2 @@\n def total(xs):\n-    return xs[0] * len(xs)\n+    return {}\n"
    for name, code, status in (("good", "sum(xs)", 0), ("bad", "xs[-1] * len(xs)", 1)):
        (tmp_path / f"{name}.diff").write_text(diff.format(code))
        done = cli("run", "pack00", "--release", "1.0", "--patch", tmp_path / f"{name}.diff", cache=cache)
        assert done.returncode == status, done.stdout
    # No record of the pack's own fix is at hand, so it is run as well, and the diff is held to as many checks.
    kept = next((tmp_path / "results" / "review" / "good").rglob("*.patched.json"))
    asked = json.loads(next(kept.parent.glob("*.patched.*.log")).read_text().splitlines()[0])["runner"]
    assert asked["checks"] == sum(name.startswith("validate: ") for name in raw(kept)["predicate"]["passedTests"]) == 5
    patch = raw(kept)["predicate"]["reproducer"]["patch"]
    assert (patch["beyond"], patch["left"]) == ([], [])
    (tmp_path / "more.diff").write_text(
        diff.format("sum(xs)").replace("+1,2 @@", "+1,5 @@") + "+\n+def more():\n+    return 1\n"
    )
    done = cli("run", "pack00", "--release", "1.0", "--patch", tmp_path / "more.diff", cache=cache)
    assert done.returncode == 1, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    assert "leaves alone: perhaps no check looks at it: reproducer_toy/__init__.py: more" in told
    assert "UNTESTABLE: not-run (reproducer_toy/__init__.py: more)" in told
    (tmp_path / "elsewhere.diff").write_text(
        diff.replace("-    return xs[0] * len(xs)\n+    return {}\n", "     return xs[0] * len(xs)\n+\n+total = sum\n").replace(
            "+1,2 @@", "+1,4 @@"
        )
    )
    done = cli("run", "pack00", "--release", "1.0", "--patch", tmp_path / "elsewhere.diff", cache=cache)
    told = " ".join(done.stdout.split())
    assert "elsewhere.diff: as released, where the pack's own fix changes it" in told and "__init__.py: total" in told, (
        done.stdout
    )
    # One that writes beside the release makes its environment unfit for the own fix: it is made anew, and nothing waits for it.
    writes = "(__import__('pathlib').Path([p for p in __import__('sys').path if 'site-packages' in p and __import__('pathlib').Path(p, 'reproducer_toy').is_dir()][0], 'reproducer_toy', 'more.py').write_text(''), sum(xs))[1]"
    (tmp_path / "writes.diff").write_text(diff.format(writes))
    done = cli("run", "pack00", "--release", "1.0", "--patch", tmp_path / "writes.diff", cache=cache)
    assert "FIX_VALIDATED" in done.stdout, done.stdout + done.stderr
    (tmp_path / "old.diff").write_text(diff.replace("xs[0]", "ys[0]"))
    done = cli("run", "pack00", "--release", "1.0", "--patch", tmp_path / "old.diff", cache=cache)
    assert done.returncode == 2
    assert "does not apply to reproducer-toy 1.0" in done.stderr
    assert "BUG_REPRODUCED" not in done.stdout + done.stderr, "it is told before anything is run"
    done = cli("run", "pack00", "--release", "2.0,1.0", "--patch", tmp_path / "good.diff", cache=cache)
    assert done.returncode == 1, "among several releases, one that the diff does not fit does not stop the others"
    assert "2.0 patched: expected NOTHING_TO_FIX" in " ".join(done.stdout.split())
    assert "is contained in reproducer-toy 2.0 already" in " ".join(done.stdout.split())
    assert "FIX_VALIDATED" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "pack77"], "There is no pack 'pack77'; those here are pack00 – pack"),
        (["run", "pack00", "--release", "99.0"], "has no release 99.0"),
        (["run", "pack00", "--relase", "1.0"], "--relase is not an option of this command"),
        (["run", "pack00", "1.0"], "'1.0' is not understood here"),
        (["run", "pack00", "--jobs", "0"], "--jobs 0"),
        (["run", "pack00", "--variant", "huge"], "has no variant 'huge'"),
        (["run", "pack00", "--lane", "quantum"], "has no lane 'quantum'"),
        (["run", "pack09", "--lane", "device", "--release", "0.7.0"], "needs an NVIDIA GPU"),
        (["run", "pack09", "--wheel", "/nowhere/liger_kernel-0.7.0-py3-none-any.whl"], "cannot be read"),
        (["run", "pack09", "--wheel", "README.md"], "does not have a wheel's file name"),
        (["run", "pack09", "--release-path", "/nowhere"], "is not a folder"),
        (["run", "pack09", "--release-path", "docs"], "holds no installed liger-kernel"),
        (["run", "pack09", "--here"], "liger-kernel is not installed in the active environment"),
        (["run", "pack00", "--without", "plus", "--release", "1.0"], "no transform 'plus'"),
        (["run", "pack00", "--patch", "/nowhere.diff", "--release", "1.0"], "cannot be read"),
        (["run", "pack00", "--patch", "x", "--without", "y"], "has no meaning beside --patch"),
        (["run", "pack00", "--machine", "../elsewhere"], "is not a folder name"),
        (["attach", "pack09"], "There is no receipt of pack09"),
        (["new-pack", "9", "again"], "taken by pack09"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(cli, cache, arguments, said, monkeypatch):
    done = cli(*arguments, cache=cache, env={"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple/", "PATH": os.environ["PATH"]})
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "pack00", "--results", ""], "--results was given without a name: is a shell variable unset?"),
        (["changes", "--upstream="], "--upstream was given without a name"),
        (["run", "pack00", "--results", "README.md"], "is not a folder: name one with --results"),
        (["run", "pack00", "--diff", "--without", "sum"], "--diff grades nothing; it has no meaning beside --without"),
        (["run", "pack00", "--debug", "patched", "--propose"], "--debug grades nothing; it has no meaning beside --propose"),
        (["pins", "--pack", "00"], "pack00 is about no upstream"),
        (["pins", "--output", "/dev/null"], "/dev/null is a pipe or a device: name a file"),
        (["hunt", "liger-kernel[x]==0.8.5", "--here"], "is not a package and one version"),
        (["check", "--upgrade", "liger-kernel>=0.8==0.8.5"], "is not NAME==VERSION"),
        (["check", "--upgrade", "liger-kernel==0.8.5", "--upgrade", "liger-kernel==0.8.2"], "names a package twice"),
        (["check", "--python", "/bin/true"], "gave no list of packages"),
        (["regress", "--pack", "09", "--upstream", "megatron-core"], "pack09 is about liger-kernel, not about megatron-core"),
        (["new-pack", "60", "okk", "--title", "a\rb"], "A title is one line of text"),
        (["new-pack", "60", "okk", "--title", "a\udcff"], "A title is one line of text"),
    ],
)
def test_nonsense_is_refused(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list((ROOT / "packs").glob("pack60*"))


def test_a_pipe_stays_a_pipe_and_a_link_a_link(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is a pipe or a device"):
        output(tmp_path / "pipe", "#")
    assert output(tmp_path / "pipe", "#", stream=True) == tmp_path / "pipe"
    (tmp_path / "file").write_text("# ours")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert output(tmp_path / "link", "#") == tmp_path / "file"


def test_no_network_is_one_sentence(cli, tmp_path):
    done = cli("run", "pack09", "--releases", "all", env={"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple/"})
    assert done.returncode == 2
    assert "The package index did not answer for liger-kernel" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_help_and_version(cli):
    for arguments in (["--help"], ["--version"], ["list"]):
        done = cli(*arguments)
        assert done.returncode == 0
        assert done.stdout
    assert cli().returncode == 2


def test_ctrl_c_keeps_what_is_done_and_leaves_nothing_running(cache, tmp_path):
    results = tmp_path / "results"
    command = [sys.executable, "-m", "common", "run", "pack00", "--release", "1.0,2.0,7.0", "--results", str(results)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "REPRODUCER_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(results.glob("*/*/*.json"))) < 4:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=30)
    assert process.returncode == 130, out + error
    assert "Stopped." in error
    assert "Traceback" not in error
    found = sorted(results.glob("*/*/*.json"))
    assert len(found) >= 4
    for path in found:
        receipt.read_log(path, receipt.read(path))
    assert not list(results.rglob("*7.0*"))
    assert not list(results.rglob("*.tmp"))
    assert not list(cache.glob("pack00-*")), "the cell's own folder is gone"


def test_nothing_private_is_stored(cli, tmp_path):
    # A cache below a home folder, a token in the environment, a user's and a host's name.
    home = tmp_path / "home" / "jdoe"
    env = {
        "HOME": str(home),
        "USER": "jdoe",
        "HOSTNAME": "gpu-node-17",
        "HF_TOKEN": "hunter2hunter2",
        "MY_SETTING": "planted-value",
        "UV_CACHE_DIR": str(tmp_path / "uv"),
    }
    done = cli("run", "pack00", "--release", "1.0,3.0", env=env, cache=home / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    files = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert len(files) == 10, "four pairs, the machine and its lock"
    for path in files:
        text = path.read_text()
        for secret in ("jdoe", "gpu-node-17", "hunter2", "planted-value", str(tmp_path), str(ROOT)):
            assert secret not in text, path


def test_a_wheel_at_hand_needs_no_index(cli, cache, tmp_path):
    import runpy

    wheels = tmp_path / "wheels"
    wheels.mkdir()
    runpy.run_path(str(ROOT / "packs" / "pack00_selftest" / "toys.py"))["build"](wheels)
    env = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple/"}
    wheel = wheels / "reproducer_toy-1.0-py3-none-any.whl"
    done = cli(
        "run",
        "pack00",
        "--here",
        "--wheel",
        wheel,
        "--wheel",
        wheels / "reproducer_toy-2.0-py3-none-any.whl",
        cache=cache,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stored = {p.name: raw(p) for p in (tmp_path / "results").rglob("reproducer-toy*.json")}
    assert len(stored) == 4
    sides = [stored[f"reproducer-toy-2.0.{side}.json"]["subject"] for side in ("unpatched", "patched")]
    assert sides[0] == sides[1], "a side with nothing to patch is about the same file"
    subject = stored["reproducer-toy-1.0.unpatched.json"]["subject"][0]
    import hashlib

    assert subject == {
        "name": wheel.name,
        "uri": "pkg:pypi/reproducer-toy@1.0",
        "digest": {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()},
    }


def test_json_of_a_receipt_is_an_in_toto_statement(cli, cache, tmp_path):
    cli("run", "pack00", "--release", "1.0", cache=cache)
    document = json.loads(next((tmp_path / "results").rglob("*1.0.unpatched.json")).read_text())
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"].endswith("/test-result/v0.1")
    assert document["predicate"]["result"] == "FAILED"
    assert document["predicate"]["reproducer"]["environment"]["distributions"]


def test_an_installed_release_is_named_by_its_record(cli, cache, tmp_path):
    import zipfile

    wheel = next((cache / "built").glob("*/reproducer_toy-1.0-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    done = cli("run", "pack00", "--release-path", tmp_path / "site", cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    document = raw(next((tmp_path / "results").rglob("*1.0.patched.json")))
    assert set(document["subject"][0]["digest"]) == {"record_sha256"}
    assert document["predicate"]["reproducer"]["patch"]["sha256"]
    assert "--record" not in done.stdout, "which such a run cannot be"
    # What is first on the path comes before everything else that Python imports.
    (tmp_path / "site" / "sitecustomize.py").write_text("")
    done = cli("run", "pack00", "--release-path", tmp_path / "site", cache=cache)
    assert done.returncode == 2
    assert "sitecustomize.py was not installed, so it is not that release" in " ".join(done.stderr.split())


def test_streams_that_are_closed_or_for_ascii_alone(cli):
    command = [sys.executable, "-m", "common", "list"]
    closed = subprocess.run(["bash", "-c", f"{shlex.join(command)} >&-"], capture_output=True, text=True, cwd=ROOT)
    assert (closed.returncode, closed.stderr) == (0, "")
    ascii_ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command[:-1], "changes", "--json"], capture_output=True, text=True, cwd=ROOT, env=ascii_)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_that_is_gone_is_one_sentence(tmp_path):
    gone = f"mkdir {tmp_path}/x; cd {tmp_path}/x; rmdir {tmp_path}/x; {sys.executable} -m common pins"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("REPRODUCER_CWD", None)
    done = subprocess.run(["bash", "-c", gone], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (2, "The folder that you are in is gone: change to another one.\n")
