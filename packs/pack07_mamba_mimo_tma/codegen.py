"""Both kernels lowered for sm_90a by one TileLang, TMA on and off, with no pipeline stages and with two: loads, stores, shared memory.

On the patched side also the second kernel with a flattened qk_dot in registers, which is what pack13 is about. No verdict.
"""

import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from repro import FACTS, KERNELS, check, finish, lowered, parser, release


def in_registers(module):
    """PYTHONPATH for the patched package with qk_dot read from a fragment [chunk, R * R], as the release reads its [chunk, R, R]."""
    source, loads = re.subn(
        r"^( +)(T\.copy\(QK_DOT.*qk_dot_shared\)\n)",
        r"\1qk_dot_frag = T.alloc_fragment([chunk_size, R * R], dtype)\n\1\2\1T.copy(qk_dot_shared, qk_dot_frag)\n",
        Path(module.__file__).read_text(),
        flags=re.MULTILINE,
    )
    source, reads = re.subn(r"qk_dot_shared\[cs, r_out", "qk_dot_frag[cs, r_out", source)
    assert loads == reads == 1
    package = Path(importlib.util.find_spec("mamba_ssm").submodule_search_locations[0])
    folder = Path(os.environ.get("TMPDIR", "."), "seed", "mamba_ssm")
    folder.mkdir(parents=True)
    for path in package.rglob("*.py"):
        copy = folder / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source if path == Path(module.__file__) else path.read_text())
    return os.pathsep.join([str(folder.parent), os.environ["PYTHONPATH"]])


def main():
    module = release()
    jobs = {
        f"{kernel}, TMA {tma}, {stages} stages": (kernel, tma, stages)
        for kernel in KERNELS
        for tma, stages in (("off", "0"), ("on", "0"), ("on", "2"))
    }
    given = {}
    if os.environ.get("REPRODUCER_SIDE") == "patched":
        seed = "mamba_mimo_bwd_bwd, TMA on, 0 stages, qk_dot in registers"
        jobs[seed] = ("mamba_mimo_bwd_bwd", "on", "0")
        given[seed] = {"env": {**os.environ, "PYTHONPATH": in_registers(module)}}
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda name: lowered(*jobs[name], **given.get(name, {})), jobs)
        FACTS["metrics"]["lowered"] = dict(zip(jobs, found, strict=True))
    for name, what in FACTS["metrics"]["lowered"].items():
        print(f"{name}: {what}")
    check("control", "something compiles", any("error" not in what for what in FACTS["metrics"]["lowered"].values()))
    finish("MEASURED")


if __name__ == "__main__":
    parser.parse_args()
    main()
