"""Run a script in a lane: ``python launch.py LANE SCRIPT ARGUMENTS…``.

Runs inside the environment under test, so it uses the standard library only. The lane's ``prepare()`` supplies what the
machine lacks; then the script runs as if it had been called itself: same ``sys.argv``, same ``sys.path[0]``, ``__main__``.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    _, name, script, *arguments = sys.argv
    lane = Path(__file__).with_name(f"{name.replace('-', '_')}.py")
    sys.path[0] = str(Path(script).parent)
    sys.argv = [script, *arguments]
    runpy.run_path(str(lane))["prepare"]()
    runpy.run_path(script, run_name="__main__")
