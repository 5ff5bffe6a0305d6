"""The deep check of pack25's fix: compilations that fail, ranks that are killed or come late, two kernels at once, more ranks, no locks, a cache that is read-only or
at its default place, other headers, flags and compilers, a rank that forks, threads, interpreters of their own, one compilation that takes half a minute, and ten by the
ranks' clocks; nvcc's arguments beside the release's, what stays open or changes in a process, the runtimes that are in memory, and the checks of a kernel's arguments.

Runs after repro.py on the patched side.
"""

import argparse
import contextlib
import ctypes
import errno
import importlib
import io
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import repro
import torch
from repro import check, finish

RANKS = 6


def nvcc(folder, before):
    """The nvcc that notes its calls, with a line of shell in front of it."""
    wrapper = Path(folder, "nvcc")
    head, rest = wrapper.read_text().split("\nexec ", 1)
    wrapper.write_text(f'{head}\ncase "$*" in *--version*) ;; *) {before} ;; esac\nexec {rest}')


def calls(folder, name, want=1, build=None, ranks=RANKS, kernels=1, **given):
    """Check that ranks call nvcc ``want`` times and none fails; ``build(original)`` takes the place of repro.build in them."""
    with mock.patch.object(repro, "build", build(repro.build) if build else repro.build):
        count, failed = repro.compiles(folder, [f"{folder}/cache"] * ranks, kernels, **given)
    check("trigger", f"{name}: {count} calls, {want} needed{'; ' + failed[0] if failed else ''}", (count, failed) == (want, []))


def first(folder, name):
    """Whether this process is the first to ask."""
    try:
        Path(folder, name).mkdir()
    except FileExistsError:
        return False
    return True


def until(path):
    for _ in range(1200):
        if path.exists():
            return
        time.sleep(0.05)
    raise TimeoutError(f"no {path.name} in a minute")


def failing(folder):
    """The first call of nvcc fails: the next rank compiles, and the others take its kernel, one that comes while it compiles too."""
    place = shlex.quote(folder)
    nvcc(folder, f"mkdir {place}/once 2>/dev/null && exit 1; : > {place}/began; sleep 1")

    def one_late(build):
        return lambda kernel: (first(folder, "late") and until(Path(folder, "began"))) or build(kernel)

    with mock.patch.object(repro, "build", one_late(repro.build)):
        count, failed = repro.compiles(folder, [f"{folder}/cache"] * RANKS, 1)
    check("trigger", f"a compilation fails: {len(failed)} of {RANKS} ranks fail, 1 has to", len(failed) == 1)
    check("trigger", f"a compilation fails: {count} calls, 2 needed", count == 2)


def state():
    """What a process has that a build must leave as it is."""
    mask = os.umask(0o077)
    os.umask(mask)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return mask, handlers, blocked, str(Path.cwd()), dict(os.environ), threading.active_count()


def kept(folder):
    """A compilation fails, and who called for it keeps the exception and waits for the others: they must not wait for it."""
    nvcc(folder, f"mkdir {shlex.quote(folder)}/once 2>/dev/null && exit 1")
    met, errors = multiprocessing.get_context("fork").Barrier(RANKS), []

    def together(build):
        def built(kernel):
            before = state()
            try:
                build(kernel)
            except Exception as error:
                errors.append(error)
            if state() != before:
                os._exit(3)
            met.wait(60)

        return built

    calls(folder, "an exception is kept", 2, together)


def late(folder):
    """Ranks that come while nvcc writes must not take what is half written."""
    nvcc(folder, f'o=; for a; do [ "$o" = -o ] && : > "$a"; o=$a; done; : > {shlex.quote(folder)}/began; sleep 1')

    def goes(build):
        return lambda kernel: build(kernel) if first(folder, "first") else until(Path(folder, "began")) or build(kernel)

    calls(folder, "ranks that come while nvcc writes", build=goes)


def killed(folder):
    """The first rank that compiles is killed: its lock goes with it, though a process that it forked lives on."""
    place = shlex.quote(folder)
    lives = f"while [ -d {place} ]; do sleep 0.2; done"
    nvcc(folder, f": > {place}/began; sleep 1; mkdir {place}/once 2>/dev/null && kill -9 $PPID && {lives}")
    with mock.patch.object(repro, "build", forking(folder, repro.build)):
        count, failed = repro.compiles(folder, [f"{folder}/cache"] * RANKS, 1, 100)
    name = f"a rank is killed while it compiles: {count} calls, 2 needed; {', '.join(failed)}"
    check("trigger", name, (count, failed) == (2, ["exit -9"]))


def at_once(folder, name="two kernels at once", build=None, ranks=RANKS):
    """Two kernels are compiled at the same time: each call of nvcc waits for another kind to have begun."""
    place = shlex.quote(folder)
    mark = f'k=$(basename "$(dirname "$1")"); : > {place}/began.$k'
    wait = f"n=0; while [ $(ls {place}/began.* | wc -l) -lt 2 ] && [ $n -lt 900 ]; do sleep 0.1; n=$((n+1)); done; [ $n -lt 900 ] || : > {place}/alone"
    nvcc(folder, f"{mark}; {wait}")
    calls(folder, name, 2, build or (lambda build: lambda kernel: build(int(first(folder, "other")))), ranks)
    check("trigger", f"{name}: neither waits for the other", not Path(folder, "alone").exists())


def no_locks(folder):
    """A file system without locks: kernels are built as in the release."""

    def refused(*_):
        raise OSError(errno.ENOSYS, "no locks here")

    def anew(build):
        """The module is imported again, for it may have the functions under names of its own."""

        def built(kernel):
            include = repro.compiler.get_jit_include_dir
            importlib.reload(repro.compiler).get_jit_include_dir = include
            build(kernel)

        return built

    names = "fcntl.flock", "fcntl.lockf", "fcntl.fcntl", "os.lockf"
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(name, refused))
        stack.enter_context(mock.patch.object(repro, "build", anew(repro.build)))
        _, failed = repro.compiles(folder, [f"{folder}/cache"] * RANKS, 1)
    check("trigger", f"a file system without locks: {len(failed)} ranks fail{': ' + failed[0] if failed else ''}", not failed)


def threads(folder):
    """Two threads of a rank, and other ranks, want one kernel; two threads want two, which are compiled at the same time."""
    nvcc(folder, "sleep 1")
    calls(folder, "two threads a rank, one kernel", build=lambda build: lambda kernel: threaded(build, kernel, kernel))


def threaded(build, *kernels):
    """Build them in a thread each; the first error of one is raised."""
    with ThreadPoolExecutor(len(kernels)) as pool:
        list(pool.map(build, kernels))


def threads_at_once(folder):
    at_once(folder, "two kernels in two threads", lambda build: lambda kernel: threaded(build, 0, 1), ranks=1)


def crossed(folder):
    """Each of two ranks builds a kernel, and in another thread wants the one that the other builds. To lockf, which knows processes, that is a deadlock."""
    nvcc(folder, f': > {shlex.quote(folder)}/began.$(basename "$(dirname "$1")"); sleep 2')

    def goes(build):
        def built(kernel):
            mine = int(first(folder, "first"))
            with ThreadPoolExecutor(2) as pool:
                done = [pool.submit(build, mine)]
                while len([*Path(folder).glob("began.*")]) < 2:
                    time.sleep(0.05)
                done.append(pool.submit(build, 1 - mine))
                [each.result() for each in done]

        return built

    calls(folder, "two ranks, two threads each, that want each other's kernel", 2, goes, ranks=2, limit=100)


def child(folder):
    """A rank forks a process while a thread of it compiles, as a DataLoader does, and it builds that kernel, too."""
    nvcc(folder, f": > {shlex.quote(folder)}/began; sleep 1")

    def goes(build):
        def built(kernel):
            if kernel == 0:
                with ThreadPoolExecutor(1) as pool:
                    done = pool.submit(build, 0)
                    until(Path(folder, "began"))
                    pid = os.fork()
                    if not pid:
                        signal.alarm(60)  # ends this process
                        build(0)
                        os._exit(0)
                    done.result()
                if os.waitpid(pid, 0)[1]:
                    raise ValueError("the process that was forked waits for ever, or fails")

        return built

    calls(folder, "a process that was forked while its parent compiles", build=goes, ranks=1)


def read_only(folder):
    """A cache that is warm may be read-only."""
    root = f"{folder}/cache"
    repro.compiles(folder, [root])
    for place, _, files in os.walk(root):
        for name in files:
            Path(place, name).chmod(0o444)
        Path(place).chmod(0o555)
    calls(folder, "a warm cache, read-only", 0, lambda build: lambda kernel: obeying() or build(kernel), kernels=2)
    for place, _, _ in os.walk(root):
        Path(place).chmod(0o755)


def at_home(folder):
    """Without DG_CACHE_DIR the cache is below the home folder."""

    def goes(build):
        def built(kernel):
            os.environ.pop("DG_CACHE_DIR", None)
            os.environ["HOME"] = f"{folder}/home"
            build(kernel)

        return built

    calls(folder, "no DG_CACHE_DIR", 2, goes, kernels=2)


def hurried(build):
    """The clocks of who waits run twenty times as fast, as if they waited for a long compilation."""
    sleep, wait = time.sleep, threading.Condition.wait

    def built(kernel):
        with contextlib.ExitStack() as stack:
            for name in ("time", "monotonic", "perf_counter"):
                clock, start = getattr(time, name), getattr(time, name)()
                fast = lambda clock=clock, start=start: start + 20 * (clock() - start)  # noqa: E731
                stack.enter_context(mock.patch.object(time, name, fast))
            stack.enter_context(mock.patch.object(time, "sleep", lambda seconds: sleep(seconds / 20)))
            waits = lambda self, timeout=None: wait(self, timeout and timeout / 20)  # noqa: E731 - of events, too
            stack.enter_context(mock.patch.object(threading.Condition, "wait", waits))
            build(kernel)

    return built


def slow(answer):
    """A compilation that takes half a minute, ten minutes by the clocks of who waits: the others wait for it."""
    with tempfile.TemporaryDirectory() as folder:
        repro.noting(folder)
        nvcc(folder, "sleep 30")
        with mock.patch.object(repro, "build", hurried(repro.build)):
            answer.send(repro.compiles(folder, [f"{folder}/cache"] * RANKS, 1))


def inside(folder):
    """All that ranks open to write lies in the cache: a lock elsewhere is not seen by other machines, or is another user's. And no kernel is written where others look."""
    root = f"{folder}/cache"

    def refuse(event, given):
        if event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            path = str(given[0])
            if path != os.devnull and (not path.startswith(root) or path.endswith("/kernel.so")):
                raise PermissionError(f"{path} is opened to write")

    hooked = lambda build: lambda kernel: sys.addaudithook(refuse) or build(kernel)  # noqa: E731
    calls(folder, "nothing is written outside of the cache, or in a kernel's own place", build=hooked)


def alone(folder):
    """A rank that is not the first of its job and wants a kernel that no other rank does, as a stage of a pipeline: it compiles it."""

    def goes(build):
        def built(kernel):
            os.environ.update(RANK="3", LOCAL_RANK="3", WORLD_SIZE="8", LOCAL_WORLD_SIZE="8")
            signal.alarm(60)  # ends this process
            build(kernel)

        return built

    calls(folder, "rank 3 alone", build=goes, ranks=1)


def named(folder):
    """A header, nvcc's place or version, or a flag that is another makes another kernel; the same ones again do not."""
    header, wrapper = Path(folder, "include/deep_gemm/a.cuh"), Path(folder, "nvcc")
    other, found = Path(folder, "other"), []

    def build(**changed):
        original = repro.build
        with mock.patch.object(repro, "build", lambda kernel: os.environ.update(changed) or original(kernel)):
            count, failed = repro.compiles(folder, [f"{folder}/cache"], 1)
        found.append((count, len(failed)))

    header.write_text("// one")
    build()
    build()
    header.write_text("// two")
    build()
    other.write_text(wrapper.read_text())
    other.chmod(0o755)
    build(DG_NVCC_COMPILER=str(other))
    build(DG_PTXAS_VERBOSE="1")
    answers(wrapper, "12.9")
    build()
    build()
    want = [(1, 0), (0, 0), (1, 0), (1, 0), (1, 0), (1, 0), (0, 0)]
    name = "the first, again, another header, nvcc elsewhere, another flag, another version, again"
    check("trigger", f"{name}: {[count for count, _ in found]} calls", found == want)


def answers(wrapper, version):
    """Let an nvcc say that it is of another version."""
    first, rest = wrapper.read_text().split("\n", 1)
    wrapper.write_text(f'{first}\ncase "$*" in *--version*) echo "release {version}"; exit ;; esac\n{rest}')


def interleaved(folder):
    """Up to nvcc 12.8 the release rewrites a kernel's machine code, which here is a byte at its end: others that come meanwhile must not find it before."""
    answers(Path(folder, "nvcc"), "12.8")
    rewriting = Path(folder, "rewriting")

    def goes(build):
        def built(kernel):
            def process(path):
                rewriting.touch()
                time.sleep(0.5)
                with Path(path).open("r+b") as file:
                    file.seek(0, os.SEEK_END)
                    file.write(b"!")

            repro.compiler.interleave_ffma.process = process
            first(folder, "first") or until(rewriting)
            build(kernel)
            (file,) = Path(folder, "cache/cache").glob("*/kernel.so")
            if not file.read_bytes().endswith(b"!"):
                raise ValueError("a kernel whose machine code is not rewritten")

        return built

    calls(folder, "nvcc 12.8, machine code rewritten", build=goes)

    def as_it_is(build):
        def built(kernel):
            os.environ["DG_DISABLE_FFMA_INTERLEAVE"] = "1"
            repro.compiler.interleave_ffma.process = lambda path: sys.exit("machine code is rewritten")
            build(kernel)

        return built

    calls(folder, "nvcc 12.8, DG_DISABLE_FFMA_INTERLEAVE: a kernel of its own, which is not rewritten", build=as_it_is)


def forking(folder, build):
    """A build of which the first rank forks a process while it compiles, as a DataLoader's, which lives until the case is over; the others come then."""
    began = Path(folder, "began")

    def worker():
        until(began)
        if not os.fork():
            while Path(folder).exists():
                time.sleep(0.1)
            os._exit(0)

    def built(kernel):
        if first(folder, "first"):
            threading.Thread(target=worker).start()
        else:
            until(began)
        build(kernel)

    return built


def forks(folder):
    """A rank forks a process while it compiles: the others wait for its kernel, not for that process."""
    nvcc(folder, f": > {shlex.quote(folder)}/began; sleep 1")
    calls(folder, "a rank forks while it compiles", build=lambda build: forking(folder, build), ranks=2, limit=100)


def strangers(folder):
    """Ranks that share nothing but the cache: each an interpreter of its own, of a parent of its own, as on several machines."""
    nvcc(folder, "sleep 1")
    Path(folder, "compiled").write_text("")
    command = ["sh", "-c", '"$0" "$@"; exit $?', sys.executable, __file__, "--rank", folder]
    ranks = [subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for number in range(4)]
    said = [rank.communicate()[0].decode()[-200:] for rank in ranks]
    count = Path(folder, "compiled").read_text().count("\n")
    failed = [text for rank, text in zip(ranks, said, strict=True) if rank.returncode]
    name = f"four interpreters: {count} calls, 1 needed{'; ' + failed[0] if failed else ''}"
    check("trigger", name, (count, failed) == (1, []))


def stranger(folder, number):
    """One of them: it says that it is there, and builds when all four are."""
    Path(folder, f"ready.{number}").touch()
    for other in range(4):
        until(Path(folder, f"ready.{other}"))
    repro.rank(f"{folder}/cache", threading.Barrier(1), folder, 1)


def argued(folder):
    """A kernel with arguments: what a rank finds in the cache names them, and their types. (Of one alone the release writes no tuple.)"""
    code = 'extern "C" void launch(int n, int m, int& code) { code = n - m; }\n'

    def typed(_):
        def built(kernel):
            runtime = repro.compiler.build("k", (("n", int), ("m", int)), code)
            if runtime(9, 2) != 7 or Path(runtime.path, "kernel.args").read_text() != "('n', int), ('m', int)":
                raise ValueError("the kernel's arguments are others")
            for wrong in ((9,), (9, 2, 1), (9, 2.0), (9, torch.zeros(1))):
                with contextlib.suppress(AssertionError):
                    runtime(*wrong)
                    raise ValueError(
                        f"a kernel takes {len(wrong)} arguments, of which the last is a {type(wrong[-1]).__name__}"
                    )

        return built

    calls(folder, "a kernel with arguments", build=typed)


def as_released():
    """The release's own compiler with all that it imports: what hides it on sys.path is left out for once."""
    ours = lambda: [name for name in sys.modules if name.split(".")[0] == "deep_gemm"]  # noqa: E731
    overlay, patched = str(Path(repro.compiler.__file__).parents[2]), {name: sys.modules.pop(name) for name in ours()}
    sys.path.remove(overlay)
    importlib.invalidate_caches()
    own = importlib.import_module("deep_gemm.jit.compiler")
    assert own.__file__ != repro.compiler.__file__
    for name in ours():
        del sys.modules[name]
    sys.path.insert(0, overlay)
    sys.modules.update(patched)
    return own


def same_call(folder):
    """nvcc is called with what the release calls it with, but for where it writes, and heard; what has been built is there at once; nothing else has changed."""

    def noted(name, compiler):
        nvcc(folder, f'echo "$*" >> {shlex.quote(folder)}/{name}; echo told by nvcc >&2')
        shutil.rmtree(f"{folder}/cache", ignore_errors=True)

        def once(build):
            def built(kernel):
                with mock.patch.object(repro, "compiler", compiler):
                    compiler.get_jit_include_dir = lambda: f"{folder}/include"
                    os.environ["DG_JIT_PRINT_NVCC_COMMAND"] = "1"
                    told, before = Path(folder, f"{name}.stderr"), state()
                    os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT), 2)
                    with contextlib.redirect_stdout(io.StringIO()) as said:
                        build(kernel)
                    if state() != before:
                        raise ValueError("signals, umask, threads, folder or environment are others")
                    if "told by nvcc" not in told.read_text() or f"{folder}/nvcc" not in said.getvalue():
                        raise ValueError("what nvcc says, or its command, is not shown")
                    links = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir()]
                    if kept := [path for path in links if folder in path and path != str(told)]:
                        raise ValueError(f"{kept[0]} stays open")
                    code = 'extern "C" void launch() {}\n'
                    if compiler.build("k", (), code) is not compiler.build("k", (), code):
                        raise ValueError("a runtime that is in memory is made once more")

            return built

        calls(folder, f"{name}: a kernel and another one, twice", 2, once, ranks=1)
        return re.sub(r"(?<= -o )\S+", "", Path(folder, name).read_text())

    released = noted("released", as_released())
    check("trigger", "nvcc gets the arguments that the release gives it", noted("fixed", repro.compiler) == released != "")


def obeying():
    """Give up what lets root pass over the modes of files; another user has it not."""
    libc, data = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    libc.capget(header, data)
    data[0] &= ~0b1110  # effective: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
    if libc.capset(header, data):
        raise OSError(f"capset: {os.strerror(ctypes.get_errno())}")


def main():
    forked = multiprocessing.get_context("fork")
    told, answer = forked.Pipe()
    forked.Process(target=slow, args=(answer,)).start()  # Its ranks wait; the other cases run meanwhile.
    answer.close()  # that of the other process is the last: an end of it is noticed
    with tempfile.TemporaryDirectory() as folder:
        repro.noting(folder)
        count, failed = repro.compiles(folder, [f"{folder}/cache"] * RANKS)
        check("control", f"{RANKS} ranks have their kernels", not failed)
        check("trigger", f"{RANKS} ranks: {count} calls, {repro.KERNELS} needed", count == repro.KERNELS)
    for case in (
        failing,
        kept,
        killed,
        late,
        at_once,
        no_locks,
        threads,
        threads_at_once,
        crossed,
        child,
        read_only,
        at_home,
        inside,
        alone,
        named,
        interleaved,
        forks,
        argued,
        same_call,
        strangers,
    ):
        with tempfile.TemporaryDirectory() as folder:
            repro.noting(folder)
            case(folder)
    count, failed = told.recv()
    check(
        "trigger",
        f"a compilation of half a minute, ten by the clocks of who waits: {count} calls, 1 needed",
        (count, failed) == (1, []),
    )
    finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    repro.compiler, repro.nvcc = repro.release()
    stranger(*given.rank) if given.rank else main()
