"""Lane ``tilelang-codegen``: TileLang kernels lowered for a GPU that is not there. Evidence: ``codegen``.

TileLang lowers for a target that is named, and needs a GPU only to run; what runs is the compiler alone. Releases up to
0.1.7.post3 load the CUDA driver when they are imported. What it replaces, none of which a pack measures:

* ``libcuda.so.1``, the driver's library, where there is none: by one whose functions all answer ``CUDA_ERROR_NO_DEVICE``.
  ``libcudart`` and ``libnvrtc`` are NVIDIA's own, from their wheels.

The folders of those and of z3's library are made known to the loader: TileLang looks for them beside itself, and here they are
in the base layer.
"""

import importlib.util
import os
import re
import struct
import sys
from ctypes.util import find_library
from pathlib import Path

_READY = "REPRODUCER_LIBRARIES"


def prepare() -> None:
    found = importlib.util.find_spec("tilelang")
    if found is None or not found.submodule_search_locations or os.environ.get(_READY):
        return
    package = Path(next(iter(found.submodule_search_locations)))
    libraries = [library.read_bytes() for library in package.rglob("*.so")]
    # One library loads the driver for all of them.
    needed = any(b"\0libcuda.so.1\0" in library for library in libraries)
    symbols = {name for library in libraries for name in re.findall(rb"(?<=\0)cu[A-Z]\w+(?=\0)", library)} if needed else set()
    folders = [str(path) for entry in sys.path for name in ("z3/lib", "nvidia/*/lib") for path in Path(entry or ".").glob(name)]
    if symbols and not find_library("cuda"):
        stub = Path(os.environ.get("TMPDIR", "/tmp")) / "libcuda"
        stub.mkdir(parents=True, exist_ok=True)
        (stub / "libcuda.so.1").write_bytes(_library(sorted(symbols)))
        folders.append(str(stub))
    folders += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    environ = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders), _READY: "1"}
    # The loader reads LD_LIBRARY_PATH once, when a process starts.
    launch = str(Path(__file__).with_name("launch.py"))
    os.execve(sys.executable, [sys.executable, launch, "tilelang-codegen", *sys.argv], environ)


def _library(symbols: list[bytes]) -> bytes:
    """An ELF shared object for x86-64 that exports ``symbols``, each a function that returns 100, CUDA_ERROR_NO_DEVICE."""
    code = b"\xb8\x64\0\0\0\xc3"  # mov eax, 100; ret
    strings = b"\0libcuda.so.1\0" + b"\0".join(symbols) + b"\0"
    at_code = 64 + 2 * 56
    at_strings = at_code + 8
    at_symbols = (at_strings + len(strings) + 7) // 8 * 8
    at_hash = at_symbols + 24 * (len(symbols) + 1)
    at_dynamic = (at_hash + 4 * (4 + len(symbols)) + 7) // 8 * 8
    table, offset = bytes(24), 14
    for symbol in symbols:
        table += struct.pack("<IBBHQQ", offset, 0x12, 0, 1, at_code, len(code))
        offset += len(symbol) + 1
    count = len(symbols) + 1
    chains = struct.pack(f"<{4 + len(symbols)}I", 1, count, 1, 0, *range(2, count), 0)  # one bucket: 1 -> 2 -> … -> end
    # DT_SONAME, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_NULL
    entries = [(14, 1), (4, at_hash), (5, at_strings), (6, at_symbols), (10, len(strings)), (11, 24), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    size = at_dynamic + len(dynamic)
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    segments = struct.pack("<IIQQQQQQ", 1, 7, 0, 0, 0, size, size, 4096)
    segments += struct.pack("<IIQQQQQQ", 2, 6, at_dynamic, at_dynamic, at_dynamic, len(dynamic), len(dynamic), 8)
    image = bytearray(size)
    for at, part in (
        (0, header + segments),
        (at_code, code),
        (at_strings, strings),
        (at_symbols, table),
        (at_hash, chains),
        (at_dynamic, dynamic),
    ):
        image[at : at + len(part)] = part
    return bytes(image)
