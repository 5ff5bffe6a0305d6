"""Take everything private out of text that will be stored or shown: paths, names of user and host, credentials."""

from __future__ import annotations

import getpass
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

#: The environment variables a run may see and a receipt may name: settings of compilers and libraries, no credentials.
ALLOWED_ENV = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|TRITON_INTERPRET|OMP_NUM_THREADS|MKL_NUM_THREADS|PYTORCH_CUDA_ALLOC_CONF"
    r"|PYTORCH_ALLOC_CONF|TORCHDYNAMO_DISABLE|CUBLAS_WORKSPACE_CONFIG|NVTE_[A-Z0-9_]+|NCCL_[A-Z0-9_]+|TL_[A-Z0-9_]+"
)
#: Needed to run at all, never recorded.
PLUMBING_ENV = re.compile(r"PATH|LD_LIBRARY_PATH|LANG|LC_[A-Z]+|TZ|CUDA_HOME|CUDA_PATH|TORCH_SYMM_MEM_[A-Z_]+|NVSHMEM_[A-Z_]+")

_CREDENTIALS = (
    re.compile(r"\b(?:gh[pousr]_|github_pat_|hf_|glpat-|pypi-|sk-|xox[abp]-|npm_)[A-Za-z0-9_\-]{16,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=\-]{8,}"),
    re.compile(r"(?i)(?<=token=)[A-Za-z0-9._~+/\-]{8,}"),
    re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*"),
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.IGNORECASE)


def allowed_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environ`` that a receipt may name."""
    return {name: value for name, value in sorted(environ.items()) if ALLOWED_ENV.fullmatch(name)}


def run_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environ`` that a run may see."""
    return {n: v for n, v in environ.items() if ALLOWED_ENV.fullmatch(n) or PLUMBING_ENV.fullmatch(n)}


class Scrubber:
    """Replaces known folders by names such as ``<overlay>``, and whatever else is private by ``<…>`` marks.

    ``folders`` are (name, folder) pairs; where a folder is given twice, its first name holds.
    """

    def __init__(self, folders: Iterable[tuple[str, Path]] = (), environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        pairs: list[tuple[str, str]] = []
        for label, folder in folders:
            pairs += [(str(folder), label), (str(folder.resolve()), label)]
        home = environ.get("HOME") or str(Path.home())
        pairs += [(home, "~"), (str(Path(home).resolve()), "~")]
        pairs += [(tempfile.gettempdir(), "<tmp>")]
        # The longest first, or "<checkout>" would hide the "<overlay>" inside it.
        unique = {path.rstrip("/"): label for path, label in reversed(pairs) if len(path.rstrip("/")) > 1}
        self._paths = sorted(unique.items(), key=lambda pair: -len(pair[0]))
        self._words = [(re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w-])"), mark) for word, mark in _identities(environ)]
        self._values = sorted((v for n, v in environ.items() if _SECRET_NAME.search(n) and len(v) >= 8), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, "<secret>")
        for pattern in _CREDENTIALS:
            text = pattern.sub("<secret>", text)
        for path, label in self._paths:
            text = re.sub(rf"{re.escape(path)}(?![\w.-])", lambda _, label=label: label, text)  # type: ignore[misc]
        for pattern, mark in self._words:
            text = pattern.sub(mark, text)
        return re.sub(r"/(?:home|Users)/[^/\s\"':]+", "~", text)


def _identities(environ: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    users = {environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    with suppress(Exception):
        users.add(getpass.getuser())
    hosts = {socket.gethostname(), environ.get("HOSTNAME", "")}
    hosts |= {host.partition(".")[0] for host in hosts}
    # Words that every machine uses would only make holes in a log ("root" is nobody's name, "localhost" nobody's host).
    for words, mark in ((users, "<user>"), (hosts, "<host>")):
        for word in sorted(words, key=len, reverse=True):
            if len(word) >= 3 and word not in {
                "root",
                "user",
                "runner",
                "localhost",
                "host",
                "linux",
                "torch",
                "triton",
                "python",
            }:
                yield word, mark
