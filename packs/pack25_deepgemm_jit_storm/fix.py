"""The fix: whoever builds a kernel holds a lock on it, and whoever waited for the lock looks into the cache once more.

Two locks: one of threads, for the other one is held by a process as a whole; and one of a file, which other processes see.
"""

import re

from common.transforms import insert_before, replace

_LOCKED = '''\
_building = {}  # path: the lock of the threads here that want the kernel
os.register_at_fork(after_in_child=_building.clear)  # the threads that hold them are not there


@contextlib.contextmanager
def _locked(path):
    """Holds a lock on a kernel's path; on a file system without locks processes build the kernel as before."""
    os.makedirs(get_cache_dir(), exist_ok=True)
    with _building.setdefault(path, threading.Lock()), open(f'{path}.lock', 'w') as lock:
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX)  # not flock, whose lock a process that was forked meanwhile holds, too
            except OSError as error:
                if error.errno == errno.EDEADLK:  # of processes; their threads hold one lock each, and end
                    time.sleep(0.1)
                    continue
            break
        yield


'''


def _under_the_lock(found: re.Match[str]) -> str:
    inside = re.sub(r"^(?=.)", "    ", found[0], flags=re.MULTILINE)
    return f"""\
    with _locked(path):
        if runtime_cache[path] is not None:  # built by another process in the meantime
            return runtime_cache[path]

{inside}"""


FIX = {
    "deep_gemm/jit/compiler.py": (
        replace(
            "import",
            r"\Aimport hashlib\n",
            "import contextlib\nimport errno\nimport fcntl\nimport hashlib\nimport threading\nimport time\n",
        ),
        insert_before("lock", r"^def build\(", _LOCKED),
        replace("locked", r"^    # Write the code\n(?:.*\n)+?    return runtime_cache\[path\]\n", _under_the_lock),
    ),
}
