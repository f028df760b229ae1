"""The ranks of a run: who they are, how they communicate, whether they share a disk, and which of them are lost."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ..state_store.ranks import Ranks, TorchRanks, agreement
from .errors import ConfigError, RanksLostError, RunError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MEETING_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits at startup for others, which a wrong option may have ended already."""
TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another that is alive, for example while each compiles in the first step."""
SNAPSHOT_TIMEOUT = timedelta(hours=1)
"""Timeout for writing the rows of a snapshot, which depends on the disk, and for an evaluation."""
BEAT_SECONDS = 1.0
SILENT_AFTER_SECONDS = 5.0
"""A rank without a heartbeat for this long is lost."""
LINGER_SECONDS = 2.0
"""How long rank 0, which may hold the store, stays for ranks that have yet to notice a lost neighbour."""
SEEN_WITHIN_SECONDS = 5.0
"""Time within which a file written on one machine must be visible on the others."""

_ALONE = Ranks()


@dataclass(frozen=True)
class World:
    """The ranks of a run, from the point of view of one of them. `World()` is a run of one process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank within this machine, which selects its GPU."""
    local_size: int = 1
    """Ranks on this machine, which share its cores."""
    control: Ranks = _ALONE
    """For the training thread; every rank makes the same calls in the same order."""
    snapshots: Ranks = _ALONE
    """For the state store, which writes snapshots in its own thread."""
    slow_group: Ranks = _ALONE
    """As `control`, with a long timeout."""
    heartbeats: Heartbeats | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run's files and talks to the user."""
        return self.rank == 0

    def all_gather(self, own: Sequence[int]) -> list[list[int]]:
        """Return every rank's integers or flags, equally many from each, in rank order. Never waits for a GPU."""
        if not isinstance(self.control, TorchRanks):
            return [list(own)]
        return self.control.all_gather(own)

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Called by all ranks."""
        return any(of_rank for (of_rank,) in self.all_gather([flag]))

    def lost_ranks(self) -> list[int]:
        """Return the lost ranks after a collective has failed; takes a few seconds."""
        return [] if self.heartbeats is None else self.heartbeats.lost()

    def named(self, ranks: Sequence[int]) -> str:
        """Describe these ranks with machine and process."""
        assert self.heartbeats is not None
        return " and ".join(f"rank {rank} ({self.heartbeats.place(rank)})" for rank in ranks)


ALONE = World()


@contextmanager
def joined_world() -> Iterator[World]:
    """Yield the world started by torchrun or a launcher with the same variables; a single process without one.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    Raises ConfigError if some are missing, and RanksLostError if other ranks do not join, or if the body fails because
    they are lost.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    # torch would print a page of addresses per broken connection and rank; it reads this variable on import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if missing := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; start the ranks with "
            "torchrun, or unset WORLD_SIZE"
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if on_gpus := torch.cuda.is_available():
        if (gpus := torch.cuda.device_count()) < local_size:
            raise ConfigError(f"{local_size} ranks were started on a machine with {gpus} GPUs; start one per GPU, "
                              "or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU")  # fmt: skip
        torch.cuda.set_device(local_rank)
    try:
        store, rank, size = next(rendezvous("env://", timeout=MEETING_TIMEOUT))
    except dist.DistError as error:
        raise RanksLostError(
            f"rank {os.environ['RANK']} could not join all {os.environ['WORLD_SIZE']} ranks within "
            f"{MEETING_TIMEOUT.total_seconds():.0f} seconds: {str(error).splitlines()[0]} Check the messages of the "
            f"others, and whether they can reach {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        ) from error
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    # On the CPU: these messages must not wait for the GPU.
    control = TorchRanks(dist.new_group(backend="gloo", timeout=TIMEOUT))
    snapshots = TorchRanks(dist.new_group(backend="gloo", timeout=SNAPSHOT_TIMEOUT))
    slow_group = TorchRanks(dist.new_group(backend="gloo", timeout=SNAPSHOT_TIMEOUT))
    with Heartbeats(store, rank, size) as heartbeats:
        world = World(rank, size, local_rank, local_size, control, snapshots, slow_group, heartbeats)
        try:
            yield world
        except RuntimeError as error:
            if lost := world.lost_ranks():
                raise RanksLostError(f"lost {world.named(lost)}; see its messages") from error
            raise
    # Not after an error: destroying a group with a lost rank may block.
    dist.destroy_process_group()


class Heartbeats:
    """Every rank sends a heartbeat each second, independently of its work, so that a lost one can be named.

    A failed collective says which connection broke, not which rank is the cause: a rank that loses its neighbour ends
    as well, and then its own neighbours do.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="thermopile-heartbeats", daemon=True)

    def __enter__(self) -> Heartbeats:
        self._store.set(f"place/{self._rank}", f"{socket.gethostname()}, process {os.getpid()}")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2 * BEAT_SECONDS)  # bounded, in case the store is gone and does not answer

    def lost(self) -> list[int]:
        """Return the ranks without a heartbeat; all ranks report what the first to notice found."""
        try:
            if not self._store.check(["lost"]):
                before = self._beats()
                time.sleep(SILENT_AFTER_SECONDS)
                silent = [rank for rank, beats in enumerate(self._beats()) if beats == before[rank]]
                self._store.compare_set("lost", "", ",".join(map(str, silent)))
            named = self._store.get("lost").decode()
        except RuntimeError:  # the store is gone, and the process that held it
            return [0]
        if self._rank == 0:
            time.sleep(LINGER_SECONDS)
        return [int(rank) for rank in named.split(",") if rank]

    def place(self, rank: int) -> str:
        """Return the machine and process of a rank."""
        try:
            return self._store.get(f"place/{rank}").decode()
        except RuntimeError:
            return "on the machine that ran the rendezvous"

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._store.add(f"beats/{self._rank}", 1)
            except RuntimeError:  # the store is gone; its users will notice
                return

    def _beats(self) -> list[int]:
        return [self._store.add(f"beats/{rank}", 0) for rank in range(self._size)]


def refuse_separate_directories(world: World, folder: Path) -> None:
    """Raise ConfigError on every rank, naming ranks, unless all see the same directory. Called by all ranks.

    Each rank writes its rows of a snapshot there and reads those of the others. folder: exists on rank 0.
    Raises RunError or OSError if rank 0 cannot write to it.
    """
    if world.size == 1:
        return
    host, written = socket.gethostname(), None
    with ExitStack() as end:
        with agreement(world.control, RunError):
            if world.is_first:
                # A name that no copy of the directory contains, and that remove_leftovers removes after a kill.
                file = folder / f".ranks.{secrets.randbits(64)}.partial"
                file.touch(exist_ok=False)
                end.callback(file.unlink, missing_ok=True)
                written = file.name, host
        name, host_of_first = world.control.broadcast(written)
        separate = None if _is_seen(folder / name) else f"rank {world.rank} (on {host})"
        found = [rank for rank in world.control.broadcast(world.control.gather(separate)) if rank]
    if found:
        raise ConfigError(
            f"{' and '.join(found)} cannot see files that rank 0 (on {host_of_first}) writes in its run directory, "
            f"{folder}: set --out to a directory on a disk that all machines share"
        )


def _is_seen(file: Path) -> bool:
    end = time.monotonic() + SEEN_WITHIN_SECONDS
    while not (is_seen := file.exists()) and time.monotonic() < end:
        # A network disk caches that a file is missing, and refreshes this when a directory is listed.
        for folder in (file.parent.parent, file.parent):
            with suppress(OSError):
                os.listdir(folder)
        time.sleep(0.1)
    return is_seen
