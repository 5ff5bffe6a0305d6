# /// script
# requires-python = ">=3.10"
# dependencies = ["reproducer-toy==1.0"]
# ///
"""The self-test's bug: total([1, 2, 3]) of reproducer-toy 1.0 reads the first element and takes it for all of them.

Its other releases end in every other way a run can end, also in ways that must not pass for a verdict.
"""

from importlib.metadata import version


def compare(role, name, got, want):
    check(role, name, error=abs(got - want) / abs(want), limit=1e-8)


def main():
    import reproducer_toy

    mode = getattr(reproducer_toy, "MODE", "")
    FACTS.update(file=reproducer_toy.__file__, version=version("reproducer-toy"), evidence="source")
    if mode == "no-such-gpu":
        FACTS["evidence"] = "device:sm_999"
    if mode == "runs-nothing":
        forged("ABSENT")
    if mode == "contradiction":
        dumps = json.dumps
        json.dumps = lambda facts: dumps({**facts, "verdict": "ABSENT"} if "verdict" in facts else facts)
    if mode == "wrong-exit":
        sys.exit = lambda code: os._exit(sys.stdout.flush() or 0)
    compare("control", "all elements the same", reproducer_toy.total([2.0, 2.0, 2.0]), 6.0)
    compare("trigger", "elements that differ", reproducer_toy.total([1.0, 2.0, 3.0]), 6.0)
    if forge := {"control-fails": "REPRODUCED", "not-a-number": "ABSENT"}.get(mode):
        forged(forge)
    finish()


def forged(verdict):
    """A verdict that the checks do not give."""
    print(json.dumps({**FACTS, "checks": CHECKS, "verdict": verdict}))
    print({"REPRODUCED": "BUG_REPRODUCED", "ABSENT": "BUG_ABSENT"}[verdict])
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}[verdict])


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import threading
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}
ROLES = ("control", "trigger", "signature")


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row, unclear = {"role": role, "name": name}, (error if limit is None else ok) is not None
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and 0 <= error <= limit
    number = type(ok) in (int, float) or str(getattr(ok, "dtype", "bool")) not in ("bool", "torch.bool")
    answer = not (number or unclear or callable(ok) or isinstance(ok, (str, complex)) or hasattr(ok, "__next__"))
    if role not in ROLES or not name or not answer or (limit is not None and not 0 < limit < math.inf):
        raise TypeError(f"this check cannot be judged: {role!r}, {name!r}, ok={ok!r}, limit={limit!r}")
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ROLES}
    if verdict not in (None, "CHANGED", "UNTESTABLE", "MEASURED"):
        raise ValueError(f"the checks give the verdict, not {verdict!r}")
    if verdict is None:
        if not {"control", "trigger"} <= {c["role"] for c in CHECKS}:
            verdict, reason = "CHANGED", "nothing was checked"
        elif bad := failed["control"] or (failed["trigger"] and failed["signature"]):
            verdict, reason = "CHANGED", bad[0]
        else:
            verdict = "REPRODUCED" if failed["trigger"] else "ABSENT"
    if verdict == "MEASURED" and (bad := [name for names in failed.values() for name in names]):
        verdict, reason = "CHANGED", bad[0]
    absent = "FIX_VALIDATED" if os.environ.get("REPRODUCER_SIDE") == "patched" else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    facts = json.dumps({**FACTS, "checks": CHECKS, "verdict": verdict})
    print(json.dumps(json.loads(facts, parse_constant=lambda _: None)))  # NaN is no JSON.
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0, "MEASURED": 0}.get(verdict, 125))


def unexpected(kind, error, trace):
    traceback.print_exception(kind, error, trace)
    if issubclass(kind, ImportError):
        finish("UNTESTABLE", "import")
    if kind.__name__ in ("MemoryError", "OutOfMemoryError"):
        finish("UNTESTABLE", "oom")
    if issubclass(kind, Exception):
        finish("CHANGED", kind.__name__)


def in_a_thread(given):
    traceback.print_exception(*given[:3])
    CHECKS.append({"role": "control", "name": f"no thread ends with {given.exc_type.__name__}", "ok": False})


sys.excepthook, threading.excepthook = unexpected, in_a_thread
# --- end of report/1 ---

if __name__ == "__main__":
    main()
