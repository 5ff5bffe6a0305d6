"""Which releases there are, with the network, without it, and with nonsense for an answer."""

import hashlib
import json
import os
import types
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cli import run
from common.errors import UserError
from common.install import releases
from common.install.releases import FRESH, Release, choose
from common.packs.pack import all_packs, find
from common.run.plan import planned
from common.store import audit

KNOWN = [
    Release(version=v, file=f"toy-{v}.whl", sha256="0" * 64) for v in ("0.5.2", "0.5.9", "0.5.10", "0.6.5", "0.7.0", "0.8.2")
]


@pytest.fixture
def index(monkeypatch):
    """The package index, answering with `KNOWN` until it is told to fail."""

    class Index:
        asked = 0
        error = None

        def __call__(self, package, python, index):
            self.asked += 1
            if self.error:
                raise UserError(self.error)
            return KNOWN

    index = Index()
    monkeypatch.setattr(releases, "_ask", index)
    return index


def versions(wanted, cache):
    return [r.version for r in choose(find("pack09"), wanted, cache)[0]]


def test_choices(index, tmp_path):
    assert versions(None, tmp_path) == versions("pinned", tmp_path) == ["0.7.0", "0.8.2"]
    assert versions("all", tmp_path) == [r.version for r in KNOWN]
    assert versions("0.6.5", tmp_path) == ["0.6.5"]
    assert versions("0.6.5, 0.7.0 ,0.6.5", tmp_path) == ["0.6.5", "0.7.0"]
    assert versions(">=0.5.9,<0.7", tmp_path) == ["0.5.9", "0.5.10", "0.6.5"]
    assert versions("0.8.2,>=0.5.9,<0.6", tmp_path) == ["0.8.2", "0.5.9", "0.5.10"]
    assert index.asked == 1


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("0.6.6", "has no release 0.6.6 on the index; the newest are"),
        ("latest", "neither a version nor a specifier"),
        (">=9", "No release matches"),
        (">=x", "not a version specifier"),
        (",", "No release was named"),
        ("", "No release was named"),
    ],
)
def test_a_release_that_is_not_there_is_one_sentence(index, tmp_path, wanted, said):
    with pytest.raises(UserError, match=said):
        choose(find("pack09"), wanted, tmp_path)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_wish_is_met_or_refused_in_a_sentence(tmp_path_factory, text):
    cache = tmp_path_factory.getbasetemp()
    (cache / "index").mkdir(exist_ok=True)
    (cache / "index" / "liger-kernel.json").write_text(
        json.dumps([{"version": "0.7.0", "file": "f", "sha256": "0", "others": []}])
    )
    try:
        chosen, _ = choose(find("pack09"), text, cache)
    except UserError as error:
        assert "\n" not in str(error) or "\n" in text
    else:
        assert chosen


def test_offline_the_last_answer_stands_in_and_says_so(index, tmp_path):
    choose(find("pack09"), "all", tmp_path)
    old = (tmp_path / "index" / "liger-kernel.json").stat().st_mtime - FRESH - 1
    os.utime(tmp_path / "index" / "liger-kernel.json", (old, old))
    index.error = "The package index did not answer."
    chosen, warnings = choose(find("pack09"), "all", tmp_path)
    assert len(chosen) == len(KNOWN)
    assert "did not answer" in warnings[0]
    assert "Going by the list of" in warnings[0]


def test_offline_with_nothing_known_the_pinned_are_run_and_others_refused(index, tmp_path):
    index.error = "The package index did not answer."
    chosen, warnings = choose(find("pack09"), None, tmp_path)
    assert [r.version for r in chosen] == ["0.7.0", "0.8.2"]
    assert "pinned releases" in warnings[0]
    with pytest.raises(UserError, match="did not answer"):
        choose(find("pack09"), "all", tmp_path)


@pytest.mark.parametrize("garbage", ["", "{", "[]", "[1]", '[{"version": 1}]', '"x"', "null"])
def test_a_cache_that_is_not_whole_is_asked_again(index, tmp_path, garbage):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "liger-kernel.json").write_text(garbage)
    assert len(choose(find("pack09"), "all", tmp_path)[0]) == len(KNOWN)
    assert index.asked == 1


def test_a_cache_from_the_future_is_asked_again(index, tmp_path):
    choose(find("pack09"), "all", tmp_path)
    future = (tmp_path / "index" / "liger-kernel.json").stat().st_mtime + 10 * FRESH
    os.utime(tmp_path / "index" / "liger-kernel.json", (future, future))
    choose(find("pack09"), "all", tmp_path)
    assert index.asked == 2


@pytest.mark.parametrize("answer", [b"", b"<html>", b"\xff\xfe", b"{}", b"<a href='x'>no-such-file</a>"])
def test_an_index_that_answers_with_nonsense(monkeypatch, tmp_path, answer):
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_port}/simple/")
        with pytest.raises(UserError, match="package index"):
            releases.releases("liger-kernel", tmp_path)
        server.shutdown()


def test_no_index_at_all(monkeypatch, tmp_path):
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple/")
    with pytest.raises(UserError, match="is there a network"):
        releases.releases("liger-kernel", tmp_path)


def test_a_yanked_release_is_run_and_said(index, tmp_path, monkeypatch):
    from dataclasses import replace

    known = [replace(r, yanked=r.version == "0.6.5") for r in KNOWN]
    monkeypatch.setattr(releases, "_ask", lambda package, python, index: known)
    chosen, warnings = choose(find("pack09"), "0.6.5,0.7.0", tmp_path)
    assert [r.version for r in chosen] == ["0.6.5", "0.7.0"]
    assert "Yanked" in warnings[0]
    assert "0.6.5" in warnings[0]
    assert "0.7.0" not in warnings[0]


def test_an_index_that_never_answers(monkeypatch, tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:  # takes the connection, and says nothing
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.getsockname()[1]}/simple/")
        monkeypatch.setattr(releases, "TIMEOUT", (0.2, 0.2))
        with pytest.raises(UserError, match=r"did not answer for liger-kernel \((?:ReadTimeout|ConnectionError)\)"):
            releases.releases("liger-kernel", tmp_path)


def file(name, kind, sha256):
    return types.SimpleNamespace(
        filename=name, package_type=kind, version="1.0", digests={"sha256": sha256}, upload_time=None, is_yanked=False
    )


def test_wheels_for_another_python_are_taken_where_a_pack_asks_for_them(monkeypatch, tmp_path):
    newer = file("toy-1.0-cp399-cp399-manylinux_2_17_x86_64.whl", "wheel", "new")
    sdist, win = file("toy-1.0.tar.gz", "sdist", "b"), file("toy-1.0-cp399-cp399-win_arm64.whl", "wheel", "w")
    for there in ([newer, sdist, win], [win, sdist, newer]):
        page = types.SimpleNamespace(packages=there)
        monkeypatch.setattr("pypi_simple.PyPISimple.get_project_page", lambda *_, page=page, **__: page)
        cache = tmp_path / there[0].digests["sha256"]
        assert releases.releases("toy", cache)[0][0].sha256 == "b"
        assert releases.releases("toy", cache, python="3.99")[0][0].sha256 == ("new" if os.uname().machine == "x86_64" else "b")
    assert not releases.fits(newer.filename)
    assert releases.fits(sdist.filename)
    assert releases.fits("toy-1.0-py3-none-any.whl")


@pytest.fixture
def cpu_wheels(monkeypatch, tmp_path):
    """pack41, whose index has builds of torch for CPUs alone, and a folder of find-links."""
    links = tmp_path / "my links"
    links.mkdir()
    for name in (
        "torch-2.98.0+cpu-py3-none-any",
        "torch-2.97.0+cpu-cp39-cp39-win_arm64",
        "torchvision-1.0-py3-none-any",
        "torch-2.98",
    ):
        (links / f"{name}.whl").write_bytes(b"a wheel")
    monkeypatch.setattr(releases, "find_links", lambda: f"https://example.org/wheels , file://{tmp_path}/my%20links")
    return find("pack41"), links


def test_a_pack_may_name_its_index(cpu_wheels, monkeypatch, tmp_path):
    """As torch's, whose builds for CPUs PyPI has not: "2.13.0+cpu" there is release 2.13.0."""
    pack, asked = cpu_wheels[0], []

    def page(client, package, timeout):
        asked.append(client.endpoint.rstrip("/"))
        wheel = file("torch-2.99.0+cpu-py3-none-any.whl", "wheel", "a")
        return types.SimpleNamespace(packages=[types.SimpleNamespace(**{**vars(wheel), "version": "2.99.0+cpu"})])

    monkeypatch.setattr("pypi_simple.PyPISimple.get_project_page", page)
    (found,), warning = releases.of(pack, tmp_path / "one")
    assert (found.version, found.sha256, found.at_hand, warning, asked) == ("2.99.0", "a", False, None, [pack.index])
    (found,), _ = releases.releases("torch", tmp_path / "one", index="https://download.pytorch.org/whl/cu130")
    assert asked[1:] == ["https://download.pytorch.org/whl/cu130"], "another index of the same host has a list of its own"
    (found,), _ = releases.releases("torch", tmp_path / "one")
    assert found.version == "2.99.0+cpu", "elsewhere a local version is no release"
    assert audit.Published(tmp_path / "verify", {"torch": pack.index}).sha256("torch", "2.99.0") == ("a",)


def test_wheels_at_hand_stand_in_for_a_packs_own_index_that_cannot_be_reached(cpu_wheels, monkeypatch, tmp_path):
    pack, links = cpu_wheels

    def silent(*_, error=releases.NoAnswer):
        raise error("It did not answer.")

    monkeypatch.setattr(releases, "_ask", silent)
    (found,), warning = releases.of(pack, tmp_path)
    assert (found.version, found.sha256, found.at_hand) == ("2.98.0", hashlib.sha256(b"a wheel").hexdigest(), True)
    assert warning == "It did not answer. Going by the wheels in find-links, which are compared with no index."
    assert releases.fetch("torch", found.file, tmp_path / "env", sha256=found.sha256) == links / found.file, "it is not fetched"
    with pytest.raises(UserError, match="did not answer"):
        releases.of(replace(pack, index=None), tmp_path)
    published = audit.Published(tmp_path, {"torch": pack.index})
    assert published.sha256("torch", "2.98.0") == (), "nothing is verified by a wheel that happens to lie there"
    wheel = links / found.file
    plan = replace(planned(pack, "", "cpu", wheels={"2.98.0": wheel}), cache=tmp_path)
    with pytest.raises(UserError, match="did not answer"):
        run._of_the_index(plan)  # --record --wheel
    monkeypatch.setattr(releases, "_ask", lambda *_: silent(error=UserError))
    with pytest.raises(UserError, match="did not answer"):
        releases.of(pack, tmp_path)


def test_two_packs_of_one_package_have_one_index():
    named = {(pack.package, pack.index) for pack in all_packs()}
    assert len(named) == len({package for package, _ in named})


@given(st.lists(st.from_regex(r"[0-9]\.[0-9](rc[0-9]|\.dev[0-9]|\.post[0-9])?", fullmatch=True), unique=True))
def test_development_builds_are_run_of_nightlies_alone(versions):
    known = [Release(version=v, file="", sha256="") for v in versions]
    pack = find("pack09")
    kept = [r.version for r in releases.without_builds(pack, known)]
    assert kept == [v for v in versions if ".dev" not in v]
    assert releases.without_builds(replace(pack, package=pack.nightly), known) == known


def test_the_file_for_this_machine_is_chosen_and_the_others_are_known(monkeypatch, tmp_path):
    from packaging.tags import sys_tags

    here = next(iter(sys_tags()))
    files = [
        file("toy-1.0-cp39-cp39-win_arm64.whl", "wheel", "a"),
        file("toy-1.0.tar.gz", "sdist", "b"),
        file("toy-1.0-py3-none-any.whl", "wheel", "c"),
        file(f"toy-1.0-{here}.whl", "wheel", "d"),
    ]
    for there, chosen in ((files, "d"), (files[:3], "c"), (files[:2], "b"), (files[:1], "a")):
        page = types.SimpleNamespace(packages=there)
        monkeypatch.setattr("pypi_simple.PyPISimple.get_project_page", lambda *_, page=page, **__: page)
        (found,), _ = releases.releases("toy", tmp_path / chosen)
        assert found.sha256 == chosen
        assert {found.sha256, *found.others} == {f.digests["sha256"] for f in there}
        assert releases.releases("toy", tmp_path / chosen)[0] == [found], "the kept list says the same"
