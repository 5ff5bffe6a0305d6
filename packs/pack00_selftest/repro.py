# /// script
# requires-python = ">=3.10"
# dependencies = ["reproducer-toy==1.0"]
# ///
"""The self-test's bug: total([1, 2, 3]) of reproducer-toy 1.0 reads the first element and takes it for all of them.

Its other releases end in every other way a run can end, also in ways that must not pass for a verdict.
"""

import json
import os
import sys
from importlib.metadata import version

import reproducer_toy

MODE = getattr(reproducer_toy, "MODE", "")
LIMIT = 1e-8
facts = {
    "reproducer": 1,
    "evidence": "source",
    "file": reproducer_toy.__file__,
    "version": version("reproducer-toy"),
    "comparisons": [],
}
if MODE == "no-such-gpu":
    facts["evidence"] = "device:sm_999"


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if os.environ.get("REPRODUCER_SIDE") == "patched" else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": "ABSENT" if MODE == "contradiction" else verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit(0 if MODE == "wrong-exit" else {"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def compare(role, name, got, want):
    error = abs(got - want) / abs(want)
    facts["comparisons"].append({"role": role, "name": name, "error": error, "limit": LIMIT})
    print(f"{role:<8} {name:<24} error {error:.1e}  limit {LIMIT:.0e}")
    return error


if MODE == "runs-nothing":
    finish("ABSENT")
try:
    compare("control", "all elements the same", reproducer_toy.total([2.0, 2.0, 2.0]), 6.0)
    bug = compare("trigger", "elements that differ", reproducer_toy.total([1.0, 2.0, 3.0]), 6.0)
except ValueError as error:
    finish("CHANGED", type(error).__name__)
finish("REPRODUCED" if bug > LIMIT else "ABSENT")
