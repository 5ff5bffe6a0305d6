"""A worker of `nox -s hunt`: ``launch.py LANE hunter.py HUNT PACK [--reference]``.

Runs inside the environment under test, so it uses the standard library only. Loads a pack's repro.py and hunt.py once, says what hunt.py
varies, and answers each line of options with a line that says how that case ended. What the release prints goes to standard error.
"""

import importlib
import json
import os
import runpy
import sys
from types import FrameType
from typing import Any


class Lines:
    """The lines of one file that run."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.seen: set[int] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self.file:
            return None
        self.seen.add(frame.f_lineno)
        return self


def main(hunt: str, folder: str, *more: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, folder)
    sys.argv = [f"{folder}/repro.py"]

    def say(told: object) -> None:
        print(json.dumps(told), file=out, flush=True)

    repro = importlib.import_module("repro")
    told = runpy.run_path(hunt)
    function = told["eager"] if "--reference" in more else repro.release()
    facts = {name: repro.FACTS.get(name, "") for name in ("file", "evidence", "version")}
    say({"space": told["SPACE"], "known": told["KNOWN"], **facts})
    for line in sys.stdin:
        asked = json.loads(line)
        lines = Lines(facts["file"])
        sys.settrace(lines if asked["cover"] else None)
        answer = told["case"](function, **asked["options"])
        sys.settrace(None)
        if "CUDA error" in answer["how"]:
            os.abort()  # such a process has no GPU any more
        say({**answer, "lines": sorted(lines.seen)})


if __name__ == "__main__":
    main(*sys.argv[1:])
