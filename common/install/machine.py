"""This machine: its GPUs, and a name that says what it is and not which."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import psutil

#: A machine's name: its folder in results/, and a word in every table.
MACHINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@cache
def gpu() -> tuple[dict[str, str], ...]:
    """The NVIDIA GPUs that a run may use: name, driver, compute capability, memory. Empty without one."""
    tool, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if tool is None or visible in ("", "-1"):
        return ()
    fields = ("name", "driver_version", "compute_cap", "memory.total")
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader", *([f"--id={visible}"] if visible else [])],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if done.returncode:
        return ()
    return tuple(
        dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in done.stdout.splitlines() if line.strip()
    )


def architectures(gpus: Iterable[Mapping[str, str]]) -> list[str]:
    """The compute capabilities of some GPUs as evidence names them: ``sm_90``."""
    return sorted({f"sm_{gpu['compute_cap'].replace('.', '')}" for gpu in gpus})


def machine_name() -> str:
    """A name for this machine that says what it is and not which: ``linux-x86_64-cpu``, ``linux-x86_64-nvidia-h200``."""
    names = sorted({device["name"] for device in gpu()})
    kind = re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-") or "cpu"
    count = f"-x{len(gpu())}" if len(gpu()) > 1 else ""
    return f"{platform.system().lower()}-{platform.machine().lower()}-{kind}{count}"


def describe_machine() -> dict[str, Any]:
    return {
        "schema": 2,
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpus": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": [dict(device) for device in gpu()],
    }
