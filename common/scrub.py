"""Text that will be stored or shown: nothing private in it (paths, names of user and host, credentials), and words that stay words."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

#: The longest reason or name that is taken from a log, in characters.
LONGEST = 200
#: The environment variables a run may see and a receipt may name: settings of compilers and libraries, no credentials.
ALLOWED_ENV = frozenset(
    [
        "CUDA_VISIBLE_DEVICES",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUBLAS_WORKSPACE_CONFIG",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCHDYNAMO_DISABLE",
        "TRITON_INTERPRET",
        "NCCL_ALGO",
        "NCCL_CUMEM_ENABLE",
        "NCCL_DEBUG",
        "NCCL_DEBUG_SUBSYS",
        "NCCL_IB_DISABLE",
        "NCCL_NVLS_ENABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_PROTO",
        "NCCL_SHM_DISABLE",
        "NCCL_SOCKET_IFNAME",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "NVTE_BIAS_GELU_NVFUSION",
        "NVTE_CUDA_ARCHS",
        "NVTE_DEBUG",
        "NVTE_DEBUG_LEVEL",
        "NVTE_FLASH_ATTN",
        "NVTE_FRAMEWORK",
        "NVTE_FUSED_ATTN",
        "NVTE_PYTORCH_FORCE_BUILD",
        "NVTE_TORCH_COMPILE",
        "NVTE_UNFUSED_ATTN",
        "NVTE_UNFUSED_FP8_UPDATE",
        "NVTE_WITH_NCCL_EP",
        "TL_CACHE_DIR",
        "TL_DISABLE_CACHE",
        "TL_LOG_LEVEL",
        "TL_TEMPLATE_PATH",
    ]
)
#: Needed to run at all, never recorded.
PLUMBING_ENV = re.compile(
    r"PATH|LD_LIBRARY_PATH|LANG|LC_[A-Z]+|TZ|CUDA_HOME|CUDA_PATH"
    # A machine that switches multicast over NVLink off has its reasons, which hold for what runs here as well.
    r"|TORCH_SYMM_MEM_DISABLE_MULTICAST|NVSHMEM_DISABLE_NVLS"
)

# Each begins where its first character cannot continue an earlier try, so that a text is read once, whatever it holds.
_CREDENTIALS = (
    re.compile(r"(?<![A-Za-z0-9_-])(?:gh[pousr]_|github_pat_|hf_|glpat-|pypi-|sk-|xox[abp]-|npm_)[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"(?<=://)[^/\s@]{1,4096}(?=@)"),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(?i)(?<=token=)[A-Za-z0-9._~+/-]{8,}"),
    re.compile(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.IGNORECASE)


def allowed_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environ`` that a receipt may name."""
    return {name: value for name, value in sorted(environ.items()) if name in ALLOWED_ENV}


def run_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environ`` that a run may see."""
    return {n: v for n, v in environ.items() if n in ALLOWED_ENV or PLUMBING_ENV.fullmatch(n)}


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
        written = {
            form: label for path, label in reversed(pairs) if len(path.rstrip("/")) > 1 for form in _forms(path.rstrip("/"))
        }
        self._paths = written
        # The longest first, or "<checkout>" would hide the "<overlay>" inside it. One pass for all of them.
        longest = sorted(written, key=len, reverse=True)
        self._path = re.compile(rf"(?:{'|'.join(map(re.escape, longest))})(?![\w-]|\.\w)")
        self._words = [pattern for word, mark in _identities(environ) for pattern in _places(word, mark)]
        secrets = [value for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= 8]
        self._values = sorted({form for value in secrets for form in _forms(value)}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, "<secret>")
        for pattern in _CREDENTIALS:
            text = pattern.sub("<secret>", text)
        text = self._path.sub(lambda match: self._paths[match[0]], text)
        for pattern, mark in self._words:
            text = pattern.sub(mark, text)
        return re.sub(r"/(?:home|Users)/[^/\s\"':\\]+", "~", text)


def without_password(value: str) -> str:
    """A setting such as an index's address without the user and password in it."""
    return re.sub(r"(?<=://)[^/\s@]+@", "", value)


def _forms(path: str) -> set[str]:
    """A path as it is, in JSON (where ö is \\u00f6), in bytes and in an address."""
    return {path, json.dumps(path)[1:-1], repr(path)[1:-1], repr(path.encode())[2:-1], quote(path)}


def _places(word: str, mark: str) -> list[tuple[re.Pattern[str], str]]:
    """Where a user's or host's name is one: a part of a path, or beside an @. Elsewhere it may be any word of a log.

    A whole host name such as node7.cluster.example is no word, and goes wherever it stands.
    """
    name = re.escape(word)
    if "." in word:
        return [(re.compile(rf"(?<![\w.-]){name}(?![\w-])"), mark)]
    return [(re.compile(rf"(?<=[/\\@]){name}(?![\w-])"), mark), (re.compile(rf"(?<![\w.-]){name}(?=@)"), mark)]


def _identities(environ: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    users = {environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    with suppress(Exception):
        users.add(getpass.getuser())
    hosts = {socket.gethostname(), environ.get("HOSTNAME", "")}
    hosts |= {host.partition(".")[0] for host in hosts}
    # Folders that every machine has; nobody is told by them.
    common = {"root", "user", "runner", "localhost", "host", "linux", "torch", "triton", "python"}
    for words, mark in ((users, "<user>"), (hosts, "<host>")):
        for word in sorted(words, key=len, reverse=True):
            if len(word) >= 2 and word not in common:
                yield word, mark


def plain(text: str, longest: int | None = LONGEST) -> str:
    """A log's own words, fit to be shown anywhere: on one line, no control or invisible characters, not too long."""
    text = "".join(c if unicodedata.category(c)[0] != "C" else " " if c in "\t\n" else "" for c in text)
    return text if longest is None or len(text) <= longest else f"{text[: longest - 1]}…"


def md(text: str) -> str:
    """``text`` for a line or a table's cell of Markdown; whatever could be markup, a mention or a link stands as code."""
    text = plain(text, None)
    if re.fullmatch(r"[\w .:,;()+=/%–…→-]*", text) and not re.search(
        r"://|\bwww\.|\b__|__\b|\bGH-\d|\b[0-9a-f]{7,40}\b|^\s*(?:[-+=]|\d+[.)])\s", text
    ):
        return text
    return f"`{text.replace('`', chr(39)).replace('|', '¦')}`"
