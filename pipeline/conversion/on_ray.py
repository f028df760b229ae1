"""Convert shards on a Ray cluster: one task per shard, on any node; another node repeats it if the node dies.

Tasks share the files in `.OUT.partial`, like the parts of a conversion, so all nodes must see them. Tasks end with the
process that started them, however it ends, and the next process continues with the unfinished shards.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..._version import __version__
from ..cores import cores
from ..errors import DatasetError
from .conversion import Conversion, Summary
from .marker import Counts
from .partial import PartFiles, Partial
from .shard_pool import Parts, Pool, PoolSetup, writer_of

if TYPE_CHECKING:
    from ray import ObjectRef

    from .shard_writer import Writer

MAX_RETRIES = 5
"""Maximum repetitions of a shard after its node or process died, or the file system failed."""


@contextmanager
def cluster(workers: int | None) -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS; without one, run a local one of `workers` cores during the block.

    Raises DatasetError if Ray is missing or the cluster cannot be reached.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # before the import, or Ray prints each death on stdout
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started here sends Ray's makers no reports
    try:
        import ray
    except ImportError:
        raise DatasetError("--on ray needs Ray: pip install 'thermopile[ray]'") from None
    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {} if address else {"num_cpus": workers or cores(), "include_dashboard": False}
    try:
        # Ray would try an address without an answer for minutes and print pages of messages.
        if found := re.fullmatch(r"\[?([^/]+?)\]?:([0-9]{1,5})", address or ""):
            socket.create_connection((found[1], min(int(found[2]), 65535)), timeout=5.0).close()
        with warnings.catch_warnings(action="ignore"):  # warnings about a later Ray
            ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a bad address, or ray:// without ray[client]
        said = " ".join(str(error).split())
        raise DatasetError(f"cannot use the Ray cluster {address or 'on this machine'}: {said}") from error
    try:
        yield
    finally:
        ray.shutdown()


def convert_on_ray(
    conversion: Conversion,
    *,
    reads: Sequence[Path] = (),
    on_progress: Callable[[Counts], None] = lambda counts: None,
    tell: Callable[[str], None] = lambda words: None,
) -> Summary:
    """Convert on the connected cluster, byte for byte as `run`. May be repeated, like `part` and `finish`.

    conversion: of a source with absolute paths, since each node has its own working directory. reads: files and folders
    of the source, which every node must see. Calls on_progress after each shard. Raises as part and finish, and
    DatasetError if a node lacks a file or too many nodes die.
    """
    started = time.monotonic()
    conversion = replace(conversion, pool=_pool((*reads, Path(str(Partial(conversion.place.absolute()).path)))))
    part = conversion.part(1, 1, on_progress=on_progress, tell=tell)
    return replace(conversion.finish(), seen=part.seen, seconds=time.monotonic() - started)


_Shared: TypeAlias = tuple[PoolSetup, tuple[Path, ...], str]
"""What every worker process receives once: the job, what each node must see, and the version that began it."""


def _pool(needed: tuple[Path, ...]) -> Pool:
    import ray

    def write_parts(job: PoolSetup, parts: Parts, counted: Counts, on_progress: Callable[[Counts], None]) -> None:
        shared = ray.put((job, needed, __version__))
        task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES, retry_exceptions=[OSError])(_write_part)
        running: list[ObjectRef[Counts]] = []

        def start(count: int) -> None:
            for part, work in islice(parts, count):
                running.append(task.options(name=f"shard {part.number}").remote([shared], part, work))

        try:
            start(64 + int(ray.cluster_resources().get("CPU", 0)))  # for nodes that join, or an autoscaler adds
            while running:
                done, running[:] = ray.wait(running)
                start(len(done))
                for counts in ray.get(done):
                    counted = counted.plus(counts)
                on_progress(counted)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            first_line = str(error).strip().partition("\n")[0].rstrip(".")
            raise DatasetError(
                f"Ray could not convert a shard: {first_line}. Continue with the same command"
            ) from error
        finally:
            for left in running:
                # With its worker, which might have been interrupted during an import and be unable to run another
                # task. The next conversion removes its half-written files.
                ray.cancel(left, force=True)
            if running:
                ray.wait(running, num_returns=len(running), timeout=10.0)

    return write_parts


def _write_part(shared: list[ObjectRef[_Shared]], part: PartFiles, work: Any) -> Counts:
    """Body of a task. shared: in a list, so that Ray does not unpack it for each task."""
    from .shard_writer import write_part

    counted = [Counts(0, 0, 0)]
    writer = _writer(shared[0])._replace(count_more=lambda more: counted.append(counted.pop().plus(more)))
    write_part(part, work, writer)
    return counted[0]


@lru_cache(maxsize=1)
def _writer(shared: ObjectRef[_Shared]) -> Writer:
    import ray

    job, needed, version = ray.get(shared)
    if missing := [path for path in needed if not path.exists()]:
        cure = "the source and the output must be in directories that all nodes share, under the same path"
        raise DatasetError(f"the node {socket.gethostname()} does not see {missing[0]}: {cure}")
    if version != __version__:
        raise DatasetError(
            f"the node {socket.gethostname()} has thermopile {__version__}, which may encode pictures "
            f"differently from {version}, which began the conversion; install that"
        )
    return writer_of(job, lambda counts: None)
