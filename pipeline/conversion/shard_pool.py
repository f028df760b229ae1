"""Convert shards in parallel, in independent processes on this machine; on_ray.py does so on a cluster.

A worker that raises or dies fails the conversion with that cause; workers exit with their parent, however it ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cores import cores
from ..dataset.tokenizer import load_tokenizer
from ..errors import DatasetError
from ..sources import Source
from .marker import Counts
from .partial import PartFiles
from .plan import ConvertSettings

if TYPE_CHECKING:
    from .shard_writer import Writer

SECONDS_BETWEEN_LOOKS = 0.2
PoolSetup = tuple[Source, ConvertSettings, Path]
"""Arguments for every worker. The path is the tokenizer's, which does not exist if the samples have no captions."""
Parts = Iterator[tuple[PartFiles, Any]]
"""The files and the work of every part to write, consumed lazily as workers become free."""


Pool = Callable[[PoolSetup, Parts, Counts, Callable[[Counts], None]], None]
"""Writes every part, as convert_parts does."""


def start_workers_early() -> None:
    """Import what workers need in the background: it takes seconds, which the caller can use for other work.

    Workers are forked from a server process that has only imported numba and the like (preloaded.py), once for all
    conversions of this process. This process itself cannot be forked: torch and numba may run threads in it, which do
    not survive a fork.
    """
    get_context("forkserver").set_forkserver_preload([f"{__package__}.preloaded"])
    resource_tracker.ensure_running()  # otherwise the fork server starts it and so unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # Children inherit blocked signals: Ctrl-C reaches all processes, but workers must end through `stop`.
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def processes(workers: int | None) -> Pool:
    """Return the pool of this many processes; None for one per core."""
    return partial(convert_parts, workers=workers or cores())


def convert_parts(
    job: PoolSetup, parts: Parts, counted: Counts, on_progress: Callable[[Counts], None], *, workers: int
) -> None:
    """Write every part.

    counted: counts of earlier processes. Calls on_progress with the counts a few times a second and at the end;
    an exception from it ends the conversion, as does a worker's. Raises DatasetError if a worker dies.
    """
    start_workers_early()
    context = get_context("forkserver")
    counts: Any = context.Array("Q", counted)
    stop = context.Value("b", 0, lock=False)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (pickle.dumps(job), counts, stop, dict(os.environ)))

    def submit(count: int) -> set[Future[None]]:
        return {pool.submit(_write_part, *part) for part in islice(parts, count)}

    try:
        with ThreadPoolExecutor(1) as starter:
            # Ctrl-C interrupts only the main thread. There it could arrive while a worker gets its job, or before the
            # pool knows of the worker, and the pool would then not wait for it.
            waiting = starter.submit(submit, 2 * workers).result()
            while waiting:
                finished, waiting = wait(waiting, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_EXCEPTION)
                for future in finished:
                    future.result()
                waiting |= starter.submit(submit, len(finished)).result()
                on_progress(Counts(*counts))
    except BrokenProcessPool:
        raise DatasetError(
            "a conversion process was killed, possibly out of memory; continue with --resume and fewer --workers. "
            "Workers import the script that calls this: there it must stand below `if __name__ == '__main__':`"
        ) from None
    finally:
        stop.value = 1
        pool.shutdown(wait=True, cancel_futures=True)


_writer: Writer | Exception


def _start_worker(job: bytes, counts: Any, stop: Any, environment: dict[str, str]) -> None:
    """job: a pickled PoolSetup. counts: of Counts, shared by all processes. stop: set once the conversion failed."""
    global _writer

    def add(more: Counts) -> None:
        if stop.value:
            raise InterruptedError("the conversion was stopped")
        with counts.get_lock():
            for place, number in enumerate(more):
                counts[place] += number

    os.environ.update(environment)  # the fork server has its own from its start, maybe with expired credentials
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        # Unpickled here, not by multiprocessing, where an exception would only end the worker.
        _writer = writer_of(pickle.loads(job), add)
    except Exception as error:  # noqa: BLE001  a user's source may raise anything; the first part raises it
        _writer = error


def writer_of(job: PoolSetup, count: Callable[[Counts], None]) -> Writer:
    """Return what this process needs to write parts."""
    from .shard_writer import Writer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # parallelism comes from processes
    source, settings, file = job
    tokenizer = load_tokenizer(file, context_length=settings.context_length) if file.exists() else None
    return Writer(source, settings, tokenizer, count)


def _end_with_parent() -> None:
    """Exit when the parent does: after it is killed, its workers would wait for work forever."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _write_part(part: PartFiles, work: Any) -> None:
    from .shard_writer import write_part

    try:
        if isinstance(_writer, Exception):
            raise _writer
        write_part(part, work, _writer)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001  the pool would call the worker dead
            raise DatasetError(f"{type(error).__name__}: {error}") from error
        raise
