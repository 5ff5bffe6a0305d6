"""Notes which functions that a diff changes are called, while it is judged: ``LINE FILE`` of each, a line in a file.

Python imports a module of this name when it starts, in every process: https://docs.python.org/3/library/site.html
Runs inside the environment under test, so it uses the standard library only. Tracing makes calls slow before Python 3.12, and
ends with the first call of the last function.
"""

import json
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

#: Opened once: some scripts look at what is opened.
CALLS = os.open(os.environ["REPRODUCER_CALLS"], os.O_RDWR | os.O_APPEND)
with open(os.environ["REPRODUCER_WATCH"]) as file:  # noqa: PTH123 - pathlib would be imported before any other module
    called = set(os.read(CALLS, 2**24).decode().splitlines())
    #: Where each function begins; some begin in several places, of which one is called.
    waiting = [set(places) for places in json.load(file) if not called & set(places)]
places = {place for each in waiting for place in each}
files = {place.partition(" ")[2] for place in places}


def note(code: CodeType) -> None:
    if code.co_filename in files and (place := f"{code.co_firstlineno} {code.co_filename}") in places:
        os.write(CALLS, f"{place}\n".encode())
        waiting[:] = [each for each in waiting if place not in each]
        places.intersection_update(other for each in waiting for other in each)


if not waiting:
    pass
elif sys.version_info >= (3, 12):  # in all threads, autograd's among them, and each function once

    def started(code: CodeType, offset: int) -> Any:
        note(code)
        return sys.monitoring.DISABLE

    monitoring, tool = sys.monitoring, 4
    monitoring.use_tool_id(tool, "reproducer")
    monitoring.register_callback(tool, monitoring.events.PY_START, started)
    monitoring.set_events(tool, monitoring.events.PY_START)
else:

    def started(frame: FrameType, event: str, argument: Any) -> None:
        note(frame.f_code)
        if not waiting:
            sys.settrace(None)
            threading.settrace(None)

    threading.settrace(started)
    sys.settrace(started)
