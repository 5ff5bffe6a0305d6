"""Toy releases, a package index of our own on the loopback, and the runner in this process, for tests that attack it."""

import hashlib
import http.server
import importlib.util
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from common.files import ROOT
from common.install import environment
from common.install.releases import Release
from common.packs.pack import find
from common.run import pool, runner

_spec = importlib.util.spec_from_file_location("toys", ROOT / "packs" / "pack00_selftest" / "toys.py")
toys = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toys)


@pytest.fixture
def pack():
    """The self-test's pack as one of an upstream: its releases come from an index."""
    return replace(find("pack00"), wheels=None, timeout=20)


@pytest.fixture
def plan(pack, tmp_path):
    return runner.Plan(pack=pack, lane="device", results=tmp_path / "results", machine="here", cache=tmp_path / "cache")


@pytest.fixture
def wheels(tmp_path):
    """version -> wheel of the toy releases, and of others made with ``wheels.make``."""

    class Wheels(dict):
        def make(self, version, files):
            toys.wheel(folder, version, files)
            self[version] = folder / f"reproducer_toy-{version}-py3-none-any.whl"
            return self[version]

    folder = tmp_path / "wheels"
    folder.mkdir()
    toys.build(folder)
    return Wheels({path.name.split("-")[1]: path for path in folder.glob("*.whl")})


class Index:
    """A simple index (PEP 503) with files that the tests can break; ``status`` and ``page`` replace every answer."""

    def __init__(self, url):
        self.url = url
        self.files = {}
        self.status = 200
        self.page = None
        self.hashes = {}

    def add(self, path):
        self.files[path.name] = path.read_bytes()
        return Release(
            version=path.name.split("-")[1].removesuffix(".tar.gz"),
            file=path.name,
            sha256=hashlib.sha256(self.files[path.name]).hexdigest(),
        )

    def answer(self, path):
        if self.page is not None or self.status != 200:
            return self.status, "text/html", self.page or b"broken"
        name = path.rpartition("/")[2].partition("#")[0]
        if name in self.files:
            return 200, "application/octet-stream", self.files[name]
        if "reproducer-toy" not in path:
            return 404, "text/html", b""
        links = "".join(
            f'<a href="/files/{name}#sha256={self.hashes.get(name) or hashlib.sha256(data).hexdigest()}">{name}</a><br>'
            for name, data in self.files.items()
        )
        return 200, "text/html", f"<!DOCTYPE html><html><body>{links}</body></html>".encode()


@pytest.fixture
def index(monkeypatch, tmp_path):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, kind, data = served.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served = Index(f"http://127.0.0.1:{server.server_address[1]}/simple/")
    for name in ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, served.url)

    def new_uv_cache():
        monkeypatch.setenv("UV_CACHE_DIR", tempfile.mkdtemp(dir=tmp_path))
        environment._uv_settings.cache_clear()

    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    served.new_uv_cache = new_uv_cache
    new_uv_cache()
    yield served
    environment._uv_settings.cache_clear()
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(plan):
    """Both sides of some releases; returns the rows and the failures."""

    def call(*given, **changes):
        with pool.threads(1) as workers:
            return runner.run_all([(replace(plan, **changes), release) for release in given], workers)

    return call


@pytest.fixture
def store_of(plan):
    def files():
        return {
            path.name: path.read_bytes()
            for path in Path(plan.results).rglob("*")
            if path.is_file() and path.suffix in (".json", ".log")
        }

    return files
