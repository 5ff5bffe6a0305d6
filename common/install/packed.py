"""A wheel of plain Python files, made by hand: the same files give the same bytes."""

from __future__ import annotations

import io
import re
import zipfile

from common.install.integrity import record_digest

#: Of any file in the wheel: zip knows no earlier time.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def may_hold(name: str) -> bool:
    """Whether a wheel of plain Python may hold it."""
    return not re.search(r"\.(cpp|cu|cuh|h|md)$", name)


def wheel(files: dict[str, bytes], name: str, package: str, version: str) -> bytes:
    """The bytes of a wheel of ``files`` (path below site-packages -> content)."""
    info = f"{name}-{version}.dist-info"
    files = dict(files)
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: reproducer-packs\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = [f"{path},sha256={record_digest(data)},{len(data)}" for path, data in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for path, data in sorted(files.items()):
            made.writestr(zipfile.ZipInfo(path, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return out.getvalue()
