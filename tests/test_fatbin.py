"""Cutting a library to one architecture: other code is blank, nothing moves, and what is not a fat binary is said."""

import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.dev.fatbin import MACHINE_CODE, MAGIC, PTX, cut

ENTRIES = st.lists(
    st.tuples(st.sampled_from([PTX, MACHINE_CODE]), st.sampled_from([75, 80, 90, 100]), st.binary(min_size=1, max_size=40))
)


def fat(entries):
    body = b"".join(struct.pack("<HHIQIIII", k, 0, 32, len(code), 0, 0, 0, arch) + code for k, arch, code in entries)
    return MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


@given(st.binary(max_size=30), ENTRIES, st.binary(max_size=30))
def test_only_one_architecture_is_left_and_nothing_moves(before, entries, after):
    library = before + fat(entries) + after
    if before.find(MAGIC) >= 0 or (before + MAGIC).find(MAGIC) != len(before):
        return
    kept = [entry if entry[:2] == (MACHINE_CODE, 90) else (*entry[:2], bytes(len(entry[2]))) for entry in entries]
    found, size = cut(library, 90)
    assert found == before + fat(kept) + after or MAGIC in b"".join(code for *_, code in entries)
    assert size == sum(len(code) for kind, arch, code in entries if (kind, arch) == (MACHINE_CODE, 90))


def test_what_is_not_of_its_form_is_said(tmp_path):
    with pytest.raises(ValueError, match="not of a known form"):
        cut(MAGIC + struct.pack("<HHQ", 1, 16, 40) + bytes(40), 90)
    assert cut(MAGIC + b"by chance", 90) == (MAGIC + b"by chance", 0)
    (tmp_path / "plain").write_bytes(b"no GPU code")
    for library in ("plain", "missing"):
        command = [sys.executable, "-m", "common.dev.fatbin", str(tmp_path / library), str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert library in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
