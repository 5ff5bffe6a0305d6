"""Builds the toy wheels of the self-test: one release for each way in which a run can end."""

import base64
import hashlib
import zipfile
from pathlib import Path

BUGGY = "def total(xs):\n    return xs[0] * len(xs)\n"
FIXED = "def total(xs):\n    return sum(xs)\n"
MODE = "def total(xs):\n    return sum(xs)\n\nMODE = {mode!r}\n"

#: version -> what its module does, told to the script by MODE where the release itself cannot do it.
RELEASES = {
    "1.0": BUGGY,
    "2.0": FIXED,
    "3.0": "import a_module_that_nobody_has\n",
    "4.0": "def total(xs):\n    raise ValueError('a guard of a newer release')\n",
    "5.0": BUGGY + "\nMODE = 'wrong-exit'\n",
    "6.0": MODE.format(mode="runs-nothing"),
    "7.0": "import time\n\ndef total(xs):\n    time.sleep(3600)\n",
    "8.0": BUGGY + "\nMODE = 'contradiction'\n",
    "9.0": FIXED,
    "10.0": "import os, signal\n\ndef total(xs):\n    os.kill(os.getpid(), signal.SIGSEGV)\n",
    "11.0": "def total(xs):\n    return xs[0] * len(xs) + 1e-6\n\nMODE = 'control-fails'\n",
    "12.0": "def total(xs):\n    return sum(xs) * (1 + 5e-9)\n",
    # A daemon that has left the session and the environment, and holds the script's output open.
    "0.1": "import os, time\n\n"
    + FIXED
    + """
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve('/bin/sleep', ['sleep', '3600'], {})
""",
    "0.2": "import os, signal\n\ndef total(xs):\n    os.kill(os.getpid(), signal.SIGTERM)\n",
    "0.3": "def total(xs):\n    return sum(xs) if len(set(xs)) == 1 else float('nan')\n\nMODE = 'not-a-number'\n",
    "0.4": FIXED + "\nMODE = 'no-such-gpu'\n",
    "13.0": "def total(xs):\n    big = []\n    while True:\n        big.append(bytearray(2**26))\n",
}


def build(folder: Path) -> None:
    for version, source in RELEASES.items():
        files = {"reproducer_toy/__init__.py": source}
        if version == "9.0":
            # Another version first on the path: a .pth file of this wheel puts a folder with 1.0 before everything.
            files["reproducer_toy_hook.py"] = (
                "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent / 'reproducer_toy_other'))\n"
            )
            files["reproducer_toy.pth"] = "import reproducer_toy_hook\n"
            files["reproducer_toy_other/reproducer_toy/__init__.py"] = BUGGY
            files["reproducer_toy_other/reproducer_toy-1.0.dist-info/METADATA"] = metadata("1.0")
        wheel(folder, version, files)


def metadata(version: str) -> str:
    return f"Metadata-Version: 2.1\nName: reproducer-toy\nVersion: {version}\n"


def wheel(folder: Path, version: str, files: dict[str, str]) -> None:
    info = f"reproducer_toy-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": metadata(version),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: pack00\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    with zipfile.ZipFile(folder / f"reproducer_toy-{version}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            # A fixed date makes the wheel, and so its sha256, the same every time.
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(text)}\n"
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", (2026, 1, 1, 0, 0, 0)), f"{record}{info}/RECORD,,\n")
