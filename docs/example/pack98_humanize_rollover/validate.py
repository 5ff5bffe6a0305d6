# /// script
# requires-python = ">=3.10"
# dependencies = ["humanize==4.16.0"]
# ///
"""Deep check of a fix: every unit, both bases, GNU letters, several formats, around each boundary and far from it."""

import inspect
from importlib.metadata import version

UNITS = {
    "decimal": (1000, [" kB", " MB", " GB", " TB", " PB"]),
    "binary": (1024, [" KiB", " MiB", " GiB", " TiB", " PiB"]),
    "gnu": (1024, ["K", "M", "G", "T", "P"]),
}


def right(size, base, units, form):
    """The smallest of ``units`` in which ``form`` does not write the base itself or more; the largest stays."""
    power = next(k for k in range(1, 6) if size < base ** (k + 1) or k == 5)
    power += power < 5 and form % (size / base**power) == form % base
    return form % (size / base**power) + units[power - 1]


def main():
    import humanize

    FACTS.update(file=humanize.__file__, version=version("humanize"))
    FACTS["evidence"] = "device:cpu"
    takes = "format" in inspect.signature(humanize.naturalsize).parameters  # from 0.5.1 on
    for mode, (base, units) in UNITS.items():
        asked = {"binary": {"binary": True}, "gnu": {"gnu": True}}.get(mode, {})
        for form in ("%.1f", "%.3f", "%d", "%g", "about %.2f") if takes else ("%.1f",):
            asked |= {"format": form} if takes else {}
            for name, role, sizes in (
                ("just below a boundary", "trigger", [base**k - d for k in range(2, 6) for d in (1, 49, base**k // 30000)]),
                ("at and above it", "control", [base**k + d for k in range(1, 5) for d in (0, 1, base**k // 7)]),
                ("far from it", "control", [3 * base**k // 2 for k in range(1, 5)] + [12_345_678, 987_654]),
            ):
                wrong = [size for size in sizes if humanize.naturalsize(size, **asked) != right(size, base, units, form)]
                check(role, f"{mode}, {form}: {name}", not wrong)
    small = [humanize.naturalsize(0), humanize.naturalsize(1), humanize.naturalsize(999), humanize.naturalsize("3000")]
    check("control", "bytes and text", small == ["0 Bytes", "1 Byte", "999 Bytes", "3.0 kB"])
    largest = [humanize.naturalsize(10.0**k * 0.99999)[-1] for k in (27, 33, 40)]
    check("control", "past the largest unit, which releases differ in", largest == ["B", "B", "B"])
    finish()


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
