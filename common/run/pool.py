"""Where runs run: threads of this process, or a dask cluster. The same interface on both sides: ``concurrent.futures``.

Nothing of ours schedules: https://distributed.dask.org places, moves and restarts the work on a cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from common.errors import UserError
from common.files import STOPPED

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """``stop`` ends what runs in this process, None where runs are elsewhere; ``ask`` calls a function where runs run.

    ``cancel`` ends the work at once, that which waits and that which runs.
    """

    executor: Executor
    stop: threading.Event | None
    ask: Callable[[Callable[[], Any]], Any]
    where: str
    cancel: Callable[[], None]


def ended(futures: Iterable[Future[T]]) -> Iterator[Future[T]]:
    """Each future as it ends, for a main thread that can be stopped while it waits.

    Python answers a signal in the main thread alone, and one that another thread got does not wake it: it looks up twice a second.
    """
    waiting = set(futures)
    while waiting:
        new, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
        yield from new


@contextmanager
def threads(jobs: int) -> Iterator[Pool]:
    """``jobs`` runs at a time; a thread only waits for the process that it has started."""
    with ThreadPoolExecutor(max_workers=jobs) as executor:
        stop = threading.Event()
        STOPPED.clear()

        def cancel() -> None:
            stop.set()
            STOPPED.set()
            executor.shutdown(wait=True, cancel_futures=True)

        yield Pool(executor=executor, stop=stop, ask=lambda function: function(), where=f"{jobs} at a time", cancel=cancel)


@contextmanager
def cluster(address: str, jobs: int | None = None) -> Iterator[Pool]:
    """The dask cluster with its scheduler at ``address`` (tcp://host:8786); "local" starts one of ``jobs`` processes here.

    Its workers need this checkout at the same path, with ``results/`` and ``.cache/`` on a file system that all share.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise UserError(
            "--scheduler needs dask: python -m pip install 'distributed>=2024.1' (nox does it by itself)."
        ) from error
    local = LocalCluster(n_workers=jobs, threads_per_worker=1, processes=True) if address == "local" else None
    try:
        try:
            client = Client(local or address, timeout=30)
        except (OSError, ValueError, TimeoutError) as error:
            raise UserError(
                f"No dask scheduler answers at {address}: start one with 'dask scheduler', and give the address that it prints."
            ) from error
        try:
            workers = len(client.nthreads())
            executor = client.get_executor(pure=False)
            yield Pool(
                executor=executor,
                # What a worker runs goes on until it ends; only a cluster of our own ends with us.
                cancel=lambda: executor.shutdown(wait=False),
                stop=None,
                ask=lambda function: _one_answer(client.run(function), function),
                where=f"dask, {workers} worker(s), dashboard {client.dashboard_link}",
            )
        finally:
            client.close()
    finally:
        if local is not None:
            local.close()


def _one_answer(answers: dict[str, T], function: Callable[[], T]) -> T:
    if not answers:
        raise UserError("The dask cluster has no worker: start some with 'dask worker ADDRESS'.")
    kinds = {str(answer) for answer in answers.values()}
    if len(kinds) > 1:
        raise UserError(
            f"The workers are not of one kind ({', '.join(sorted(kinds))}): receipts are kept by machine, so start a cluster for each."
        )
    return next(iter(answers.values()))
