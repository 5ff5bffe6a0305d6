"""Notes which functions of the overlay are called while somebody's diff is judged: their files and first lines, a line each.

Python imports a module of this name when it starts, in every process: https://docs.python.org/3/library/site.html
Runs inside the environment under test, so it uses the standard library only.
"""

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

FOLDER = os.environ["REPRODUCER_OVERLAY"] + os.sep
#: Opened once: some scripts look at what is opened.
FILE = os.open(os.environ["REPRODUCER_CALLS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
known: set[CodeType] = set()


def note(code: CodeType) -> None:
    if code not in known and code.co_filename.startswith(FOLDER):
        known.add(code)
        os.write(FILE, f"{code.co_firstlineno} {code.co_filename}\n".encode())


if sys.version_info >= (3, 12):  # in all threads, autograd's among them, and each function once

    def started(code: CodeType, offset: int) -> Any:
        note(code)
        return sys.monitoring.DISABLE

    monitoring, tool = sys.monitoring, 4
    monitoring.use_tool_id(tool, "reproducer")
    monitoring.register_callback(tool, monitoring.events.PY_START, started)
    monitoring.set_events(tool, monitoring.events.PY_START)
else:

    def called(frame: FrameType, event: str, argument: Any) -> None:
        note(frame.f_code)

    threading.settrace(called)
    sys.settrace(called)
