"""``python -m common.dev.fatbin LIBRARY OUT --arch 90``: blank the GPU code of other architectures in a compiled library, so that it compresses.

A fat binary is a header, 0xBA55ED50, and entries: kind (1 PTX, 2 machine code), sizes, architecture. The driver picks one by its header; what others hold is
never read. Nothing moves, so the library loads as before, on GPUs of that architecture alone.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, MACHINE_CODE = 1, 2
HEADER = struct.Struct("<4sHHQ")  # magic, version, its own size, that of all entries
ENTRY = struct.Struct("<HH I Q 12x I")  # kind, -, its own size, that of the code, architecture


def cut(library: bytes, arch: int) -> tuple[bytes, int]:
    """The library with all GPU code blank but machine code for ``arch`` (90 for sm_90), and how many bytes of that it keeps."""
    out, at, kept = bytearray(library), 0, 0
    while (at := library.find(MAGIC, at)) >= 0:
        if at + HEADER.size > len(library):
            break
        _, version, head, size = HEADER.unpack_from(library, at)
        if (version, head) != (1, HEADER.size) or at + head + size > len(library):
            at += len(MAGIC)  # the number by chance
            continue
        entry, end = at + head, at + head + size
        while entry < end:
            kind, _, head, body, of = ENTRY.unpack_from(library, entry) if entry + ENTRY.size <= end else (0,) * 5
            if head < ENTRY.size or entry + head + body > end:
                raise ValueError(f"the fat binary at {at:#x} is not of a known form")
            if (kind, of) == (MACHINE_CODE, arch):
                kept += body
            else:
                out[entry + head : entry + head + body] = bytes(body)
            entry += head + body
        at = end
    return bytes(out), kept


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m common.dev.fatbin", description=__doc__.splitlines()[2])
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="90 for sm_90 (the default)")
    options = parser.parse_args(arguments)
    try:
        library, kept = cut(options.library.read_bytes(), options.arch)
        if not kept:
            parser.error(f"{options.library} holds no machine code for sm_{options.arch}")
        options.out.write_bytes(library)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{options.out}: {kept / 2**20:.1f} MiB of GPU code kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
