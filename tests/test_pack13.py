"""Pack 13 on real releases, and the lane that stands in for a driver."""

import ctypes
import os
import runpy

import pytest

from common import files
from common.install import lanes, releases
from common.packs.pack import find
from common.run import runner
from common.run.plan import Plan
from common.store import history

PACK = find("pack13")


@pytest.mark.network
def test_the_last_wrong_release_and_the_first_right_one(tmp_path):
    known = {r.version: r for r in releases.releases(PACK.package, files.CACHE)[0]}
    plan = Plan(pack=PACK, lane="tilelang-codegen", results=tmp_path, machine="here")
    for version, outcomes in (("0.1.11", ["REPRODUCED", "NOTHING_TO_PATCH"]), ("0.1.12", ["ABSENT", "NOTHING_TO_PATCH"])):
        rows = runner.run_release(plan, known[version])
        assert [row.verdict.outcome for row in rows] == outcomes, rows
        assert all(row.as_expected for row in rows)


def test_every_release_is_stored_with_the_pins_that_it_needs():
    stored = history.load(files.RESULTS, [PACK])
    runs = {s.version: s for s in stored.of(PACK.name, PACK.package) if s.side == "unpatched"}
    assert len(runs) >= 24
    for version, seen in runs.items():
        assert not seen.stale, version
        assert seen.verdict.meets(PACK.expectation(version).verdict), version
    ffi = {d.name: d.version for d in runs["0.1.15"].document().facts.environment.distributions}
    assert ffi["apache-tvm-ffi"] == "0.1.12"
    assert [(s.first, s.last, s.fixed) for s in history.stretches(runs.values())] == [("0.1.7.post2", "0.1.11", "0.1.12")]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the stand-in is an x86-64 library")
def test_the_stand_in_for_the_driver_says_that_there_is_no_device(tmp_path):
    library = runpy.run_path(str(lanes.FOLDER / "tilelang_codegen.py"))["_library"]
    names = [b"cuInit", b"cuLaunchKernel", *(b"cuName%d" % i for i in range(200))]
    (tmp_path / "libcuda.so.1").write_bytes(library(names))
    loaded = ctypes.CDLL(str(tmp_path / "libcuda.so.1"))
    assert {getattr(loaded, name.decode())() for name in names} == {100}
    with pytest.raises(AttributeError):
        loaded.cuNotThere  # noqa: B018
