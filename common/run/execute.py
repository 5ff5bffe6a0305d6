"""How a script is started: its command, all that it sees of the environment, and the sandbox around it."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from functools import cache
from pathlib import Path

from common.errors import UserError
from common.install import lanes
from common.install.environment import Environment
from common.run.plan import Plan
from common.scrub import plain, run_env
from common.store.cell import Cell


def command(plan: Plan, there: Environment, script: Path | None = None) -> list[str]:
    return lanes.command(there.python, plan.lane, script or plan.pack.script_of(plan.variant)) + list(plan.arguments)


def environ(plan: Plan, cell: Cell, there: Environment, place: Path) -> dict[str, str]:
    """All that the script sees of the environment."""
    first = [str(place / "overlay")] if cell.side == "patched" else []
    first += [str(there.site)] if there.on_path else []
    if plan.here:
        # What the active environment was started with has to stay visible to the script, but behind the release.
        first += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    watched = watch(place).exists()
    first += [str(lanes.FOLDER / "watch")] if watched else []
    return {
        **run_env(os.environ),
        "PYTHONPATH": os.pathsep.join(first),
        # HOME is another one, and with it goes the user's own site-packages, which an active environment may rest on.
        **({"PYTHONUSERBASE": site.getuserbase()} if plan.here and site.ENABLE_USER_SITE else {}),
        # Runs beside each other share the cores; left alone, each would start a thread for every core.
        **({"OMP_NUM_THREADS": str(plan.threads)} if plan.threads and "OMP_NUM_THREADS" not in os.environ else {}),
        # torch.compile starts a process a core, 32 at most, of half a GiB each, which counts as the run's memory.
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", str(min(4, os.cpu_count() or 1))),
        "PYTHONUNBUFFERED": "1",
        # What lies in a release's folder has to be what it installed. The active environment's packages (torch) may have no
        # byte code yet, and compiling them takes longer than most runs: it is kept aside.
        **(
            {"PYTHONPYCACHEPREFIX": str(plan.cache / "pycache")}
            if plan.here or plan.release_path
            else {"PYTHONDONTWRITEBYTECODE": "1"}
        ),
        "REPRODUCER_SIDE": cell.side,
        "REPRODUCER_DIST": cell.dist,
        **({"REPRODUCER_WATCH": str(watch(place)), "REPRODUCER_CALLS": str(calls(place))} if watched else {}),
        # Compile caches go into the cell's own folder: no run sees another's kernels.
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
        "TRITON_CACHE_DIR": str(place / "home" / "triton"),
        "TILELANG_CACHE_DIR": str(place / "home" / "tilelang"),
    }


def watch(place: Path) -> Path:
    """Which functions of the overlay are watched: see common/lanes/watch."""
    return place / "home" / "watch.json"


def calls(place: Path) -> Path:
    """Where it is noted that they are called."""
    return place / "home" / "calls"


def sandboxed(plan: Plan, there: Environment, place: Path, command: list[str]) -> list[str]:
    """``command`` under bubblewrap: no network, no other processes, the person's files out of sight, all but ``place`` read-only.

    https://github.com/containers/bubblewrap
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UserError("--sandbox needs bubblewrap: install it (apt install bubblewrap), or run in a container.")
    if why := _refused(bwrap):
        raise UserError(f"--sandbox does not work here: {why}. Run in a container, or ask for user namespaces.")
    words = [bwrap, "--die-with-parent", "--new-session", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc"]
    words += ["--dev-bind", "/dev", "/dev"] if plan.lane == "device" else ["--dev", "/dev"]
    for hidden in dict.fromkeys([str(Path.home()), "/home", "/root", "/tmp", "/run", "/var/tmp"]):
        words += ["--tmpfs", str(Path(hidden).resolve())] if Path(hidden).is_dir() else []
    deep = plan.pack.deep_check(plan.variant)
    seen = [Path(sys.base_prefix), there.python.parent.parent, plan.pack.folder, lanes.FOLDER, *there.path]
    seen += [deep.parent] if deep else []
    for folder in dict.fromkeys(str(each.resolve()) for each in seen):
        words += ["--ro-bind", folder, folder]
    return [*words, "--bind", str(place), str(place), "--chdir", str(place / "tmp"), "--", *command]


@cache
def _refused(bwrap: str) -> str:
    """Why bubblewrap cannot make a sandbox here; empty where it can."""
    done = subprocess.run(
        [bwrap, "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, text=True, errors="replace"
    )
    return plain(done.stderr.strip() or f"bwrap exited with {done.returncode}") if done.returncode else ""
