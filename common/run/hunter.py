"""A worker of `nox -s hunt`: ``launch.py LANE hunter.py HUNT PACK [--reference]``.

Runs inside the environment under test, so it uses the standard library only. Loads a pack's repro.py and hunt.py once, says what hunt.py
varies, and answers each line of options with a line that says how that case ended. What it prints itself goes to standard error.
"""

import json
import os
import runpy
import sys


def main(hunt: str, folder: str, *more: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, folder)
    sys.argv = [os.path.join(folder, "repro.py")]

    def say(told: object) -> None:
        print(json.dumps(told), file=out, flush=True)

    import repro

    told = runpy.run_path(hunt)
    function = told["eager"] if "--reference" in more else repro.release()
    facts = {"file": repro.FACTS.get("file", ""), "evidence": repro.FACTS["evidence"], "version": repro.FACTS.get("version", "")}
    say({"space": told["SPACE"], "known": told["KNOWN"], **facts})
    for line in sys.stdin:
        asked = json.loads(line)
        lines: set[int] = set()
        if asked["cover"]:
            sys.settrace(lambda frame, *_: _tracer(frame, lines) if frame.f_code.co_filename == facts["file"] else None)
        answer = told["case"](function, **asked["options"])
        sys.settrace(None)
        say({**answer, "lines": sorted(lines)})


def _tracer(frame, lines):
    def trace(frame, event, _):
        lines.add(frame.f_lineno)
        return trace

    return trace(frame, "call", None)


if __name__ == "__main__":
    main(*sys.argv[1:])
