"""What several test files need: a sound log, an installed release, a script run by hand."""

import json
import os
import subprocess
from pathlib import Path

from common import files
from common.install import lanes, releases
from common.run import runner
from common.store import receipt

ROOT = Path(__file__).parent.parent
FACTS = {
    "report": 1,
    "evidence": "interpreter",
    "file": "<release>/toy/__init__.py",
    "version": "1.0",
    "verdict": "REPRODUCED",
    "metrics": {},
    "checks": [
        {"role": "control", "name": "mean", "error": 1e-7, "limit": 1e-5, "ok": True},
        {"role": "trigger", "name": "none", "error": 0.5, "limit": 1e-5, "ok": False},
        {"role": "signature", "name": "grad_output[0]", "ok": True},
    ],
}


def judged(check, **changes):
    """A check with other values, and the ``ok`` that the report block gives it."""
    check = {**check, **changes}
    numbers = [check.get(key) for key in ("error", "limit")]
    known = all(isinstance(number, int | float) for number in numbers)
    return {**check, "ok": known and numbers[0] <= numbers[1]} if "limit" in check else check


def raw(path):
    """A receipt as the JSON that it is, for tests that edit it."""
    return json.loads(Path(path).read_text())


def facts_of(row):
    return receipt.read(row.receipt).facts


def make_log(facts=FACTS, *, sentinel="BUG_REPRODUCED", exit=10, body=None, side="unpatched", **closing):
    """A stored log as the runner writes it; the default one is a sound REPRODUCED."""
    opening = {
        "form": 2,
        "pack": "pack09",
        "dist": "toy",
        "version": "1.0",
        "side": side,
        "variant": "",
        "lane": "triton-interpreter",
        "arguments": [],
    }
    lines = [json.dumps({"runner": opening})]
    lines += body if body is not None else ["some output", json.dumps(facts), sentinel]
    ending = {"exit": exit, "signal": None, "stopped": None, "seconds": 1.0, "peak_rss": 1, "cut": 0, **closing}
    return "\n".join([*lines, json.dumps({"runner": ending})]) + "\n"


def installed(pack, version):
    """The environment of one release, as the runner makes it."""
    release = next(r for r in releases.of(pack, files.CACHE)[0] if r.version == version)
    return runner.installed(pack, release, files.CACHE)


def run_script(pack, there, fixed, side, lane, *arguments, script=None):
    """A pack's script, without a GPU, with the tree ``fixed`` before the release: its last line, its JSON line, all it said."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{fixed}{os.pathsep}{there.site}",
        "REPRODUCER_SIDE": side,
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(fixed.parent),
        "TILELANG_CACHE_DIR": str((script or fixed).parent),
    }
    command = [*lanes.command(there.python, lane, script or pack.script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=fixed.parent, env=env)
    lines = ["", "", *done.stdout.splitlines()]
    facts = json.loads(lines[-2]) if lines[-2].startswith("{") else {}
    return lines[-1], facts, done.stdout + done.stderr
