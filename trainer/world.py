"""The ranks of a run: their numbers, their communication, and whether they share a disk."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ..pipeline.cores import cores, divided_cores
from ..state_store.ranks import ONE_PROCESS, Ranks, TorchRanks, agreement
from ..storage.place import Place
from .errors import ConfigError, RanksLostError, RunError
from .heartbeats import AsError, Heartbeats
from .meeting import MEETING_TIMEOUT, RankProcess, choose_interface, meet

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for a live rank, for example while each compiles in the first step."""
SNAPSHOT_TIMEOUT = timedelta(hours=1)
"""Timeout for writing the rows of a snapshot, which depends on the disk, and for an evaluation."""


@dataclass(frozen=True)
class World:
    """The ranks of a run, as seen by one rank. `World()` is a run of one process."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    """Ranks on this machine."""
    cores: int | None = None
    """This rank's share of the cores that it may use; None: all of them."""
    control: Ranks = ONE_PROCESS
    """For the training thread; every rank makes the same calls in the same order."""
    snapshots: Ranks = ONE_PROCESS
    """For the state store, which writes snapshots in its own thread."""
    slow_group: Ranks = ONE_PROCESS
    """Like `control`, with a long timeout."""
    heartbeats: Heartbeats | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run's files and talks to the user."""
        return self.rank == 0

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Called by all ranks."""
        return any(of_rank for (of_rank,) in self.control.all_gather([flag]))

    def naming_lost_ranks(self, as_error: AsError) -> AbstractContextManager[None]:
        """As `Heartbeats.naming_lost_ranks`."""
        return nullcontext() if self.heartbeats is None else self.heartbeats.naming_lost_ranks(as_error)

    def end_by_itself(self) -> None:
        """Let this rank close and report its own error, however long that takes: others with the same may end first."""
        if self.heartbeats is not None:
            self.heartbeats.leaving.set()


ALONE = World()


def current_world() -> World:
    """Return the ranks of torch.distributed's default group, which another library began; without it, one process.

    Called by all ranks.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ALONE
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    control, snapshots, slow = (TorchRanks(dist.new_group(backend="gloo", timeout=SNAPSHOT_TIMEOUT)) for _ in range(3))
    own_cores = max(1, cores() // local_size)
    return World(dist.get_rank(), dist.get_world_size(), local_size, own_cores, control, snapshots, slow)


@contextmanager
def joined_world(end: Callable[[RanksLostError], None] | None = None) -> Iterator[World]:
    """Yield the world started by torchrun or a launcher with the same variables, else a single process.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    end: called in another thread if a rank is lost but the body continues, since it may wait inside a CUDA call that
    never returns. It must end the process at once. Without it, such a call waits until NCCL aborts the process.
    Raises ConfigError if some variables are missing, RanksLostError if other ranks do not join or, lost, fail the body.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # ranks of a torchrun that is killed would go on, and nobody could tell
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    # torch would print a page of addresses per broken connection and rank; it reads this variable on import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # NCCL aborts the process four times this delay after a connection broke, and cannot name the lost rank.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "45000")
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if missing := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; start the "
            "ranks with torchrun, or unset WORLD_SIZE"
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if on_gpus := torch.cuda.is_available():
        if (gpus := torch.cuda.device_count()) < local_size:
            raise ConfigError(
                f"{local_size} ranks were started on a machine with {gpus} GPUs; start one per GPU, "
                "or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
            )
        torch.cuda.set_device(local_rank)
    try:
        public, rank, size = next(rendezvous("env://", timeout=MEETING_TIMEOUT))
    except dist.DistError as error:
        raise RanksLostError(
            f"rank {os.environ['RANK']} could not join all {os.environ['WORLD_SIZE']} ranks within "
            f"{MEETING_TIMEOUT.total_seconds():.0f} seconds: {str(error).splitlines()[0]} Check the "
            "messages of the others, and whether they can reach "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        ) from error
    name, members, connections = meet(public, rank, size)
    cores = divided_cores([(member.machine, member.cores) for member in members])[rank]
    with Heartbeats(rank, members, connections, end).beating() as heartbeats:
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        # torchrun's store outlives restarts, so each start has a part of its own there.
        store = PrefixStore(name, public)
        control, snapshots, slow_group = _groups(store, rank, members, heartbeats, backend)
        yield World(rank, size, local_size, cores, control, snapshots, slow_group, heartbeats)
    # Not after an error: destroying a group with a lost rank may block.
    dist.destroy_process_group()


def _groups(
    store: Store, rank: int, members: list[RankProcess], heartbeats: Heartbeats, backend: str
) -> list[TorchRanks]:
    """Connect the ranks, and return the groups `control`, `snapshots` and `slow_group` of World.

    Raises RanksLostError if they do not all connect within MEETING_TIMEOUT.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    choose_interface(rank, members)
    groups = []
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=len(members), timeout=MEETING_TIMEOUT)
        _set_pg_timeout(TIMEOUT)
        for timeout in (TIMEOUT, SNAPSHOT_TIMEOUT, SNAPSHOT_TIMEOUT):
            # On the CPU: these messages must not wait for the GPU.
            group = dist.new_group(backend="gloo", timeout=MEETING_TIMEOUT)
            _set_pg_timeout(timeout, group)
            groups.append(TorchRanks(group))
    except RuntimeError as error:
        if heartbeats.lost():
            raise
        raise RanksLostError(
            f"rank {rank} cannot connect to the others: {str(error).splitlines()[0]}. Set GLOO_SOCKET_IFNAME (now "
            f"{os.environ.get('GLOO_SOCKET_IFNAME', 'unset')}), and NCCL_SOCKET_IFNAME on GPUs, to each machine's "
            "interface that reaches the others"
        ) from error
    return groups


def refuse_separate_directories(world: World, folder: Place) -> None:
    """Raise ConfigError on every rank, naming ranks, unless all see the same directory. Called by all ranks.

    Each rank writes its rows of a snapshot there and reads the others'. folder: made on rank 0 if it is missing, and
    removed again if the ranks see different folders. Raises RunError or OSError if rank 0 cannot write to it.
    """
    if world.size == 1:
        return
    host, written, made = socket.gethostname(), None, list[Path]()
    with ExitStack() as end:
        with agreement(world.control, RunError):
            if world.is_first:
                name = f"{secrets.randbits(64)}"  # a name that no copy of the directory contains
                made = folder.make()
                mark = folder.mark(name)
                mark.create(b"")
                end.callback(mark.parent.remove, (mark.name,))
                written = name, host
        name, host_of_first = world.control.broadcast(written)
        separate = None if folder.mark(name).is_seen() else f"rank {world.rank} (on {host})"
        found = [rank for rank in world.control.broadcast(world.control.gather(separate)) if rank]
    if found:
        with suppress(OSError):  # another start may use it
            for each in made:
                each.rmdir()
        raise ConfigError(
            f"{' and '.join(found)} cannot see files that rank 0 (on {host_of_first}) writes in its run directory, "
            f"{folder}: {folder.sharing}"
        )
