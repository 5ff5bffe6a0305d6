"""Pack 09 on real releases. Breaking its fix or its trigger is for `nox -s mutants`."""

import json
import os
import shutil
import subprocess
from dataclasses import replace

import pytest
from helpers import raw
from packaging.version import Version

from common import files
from common.install import lanes, releases
from common.packs.pack import find
from common.run import runner
from common.run.plan import Plan
from common.store import receipt

pytestmark = pytest.mark.network
PACK = find("pack09")


@pytest.fixture(scope="module")
def known():
    return {r.version: r for r in releases.releases(PACK.package, files.CACHE)[0]}


def run(tmp_path, known, version, **changes):
    pack = changes.pop("pack", PACK)
    plan = Plan(pack=pack, lane="triton-interpreter", results=tmp_path, machine="here", **changes)
    return runner.run_release(plan, known[version])


def facts(row):
    return raw(row.receipt)["predicate"]["reproducer"]


def test_the_last_wrong_release_and_the_first_right_one(tmp_path, known):
    wrong = run(tmp_path, known, "0.8.1")
    assert [str(row.verdict) for row in wrong] == ["REPRODUCED", "ABSENT"]
    assert all(row.as_expected and row.verdict.evidence == "interpreter" for row in wrong)
    assert "204 checks of validate.py passed" in wrong[1].verdict.proofs["validation"]
    assert sum("is the release's, byte for byte" in name for name in wrong[1].verdict.passed) == 96
    right = run(tmp_path, known, "0.8.2")
    assert [row.verdict.outcome for row in right] == ["ABSENT", "NOTHING_TO_PATCH"]
    # The subject of a receipt is the very file that the index publishes.
    assert raw(right[0].receipt)["subject"][0]["digest"] == {"sha256": known["0.8.2"].sha256}


def test_expected_holds_every_release_on_the_index_just_once(known):
    assert len(known) >= 35
    for version in known:
        assert PACK.expectation(version) is not None, version
    outcomes = [PACK.expectation(str(v)).outcome for v in sorted(map(Version, known))]
    changes = [a for a, b in zip(outcomes, [*outcomes[1:], None], strict=True) if a != b]
    assert changes == ["UNTESTABLE", "CHANGED", "REPRODUCED", "CHANGED", "REPRODUCED", "ABSENT"]


def test_receipts_of_every_release_are_stored_and_show_what_is_expected(known):
    """Recording is not approval: what was seen is compared here with what the pack holds."""
    seen = {"triton-interpreter": {}, "device": {}}
    for path in receipt.stored(files.RESULTS, PACK.name):
        document = raw(path)
        found = document["predicate"]["reproducer"]
        # Whoever changes the script can run the interpreter; a device receipt may wait for somebody with a GPU, shown as stale.
        if found["lane"] == "triton-interpreter":
            side, variant = found["side"], found["variant"]
            today = PACK.hashes(side, lanes.files_of(PACK, found["lane"], side, variant), variant)
            assert receipt.read(path).hashes == today, f"{path} is stale"
        if found["version"] in known and document["subject"][0]["digest"].get("sha256"):
            assert document["subject"][0]["digest"]["sha256"] == known[found["version"]].sha256
        if not found["variant"] and found["side"] == "unpatched":
            seen[found["lane"]][found["version"]] = found
    for lane, runs in seen.items():
        newest = max(map(Version, runs))
        for version in known:
            if Version(version) > newest:
                continue  # published after the last time that all were run
            assert version in runs, f"no receipt of {version} from the lane {lane}"
            outcome, reason = runs[version]["outcome"], runs[version]["reason"]
            assert PACK.expectation(version).verdict in (outcome, f"{outcome}: {reason}"), version


def test_the_script_runs_alone_anywhere(tmp_path, known):
    import uv

    from common.install.environment import _uv_settings

    script = tmp_path / "anywhere" / "repro.py"
    script.parent.mkdir()
    shutil.copy(PACK.script, script)
    command = [uv.find_uv_bin(), "run", "--no-project", str(script)]
    done = subprocess.run(command, cwd=script.parent, env={**os.environ, **_uv_settings()}, capture_output=True, text=True)
    assert done.returncode == 10, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "BUG_REPRODUCED"
    assert json.loads(lines[-2])["verdict"] == "REPRODUCED"


def test_a_wheel_that_the_index_did_not_publish_is_refused(tmp_path, known):
    other = replace(known["0.6.5"], sha256="0" * 64)
    plan = Plan(pack=PACK, lane="triton-interpreter", results=tmp_path, machine="here")
    rows = runner.run_release(plan, other)
    assert rows[0].verdict.outcome == "INFRA"
    assert rows[0].receipt is None


def test_measuring_without_a_gpu_says_so(tmp_path, known):
    variant = "seed-times"
    rows = run(tmp_path, known, "0.7.0", arguments=PACK.variants[variant].arguments, variant=variant)
    assert str(rows[0].verdict) == "UNTESTABLE: no-device"
