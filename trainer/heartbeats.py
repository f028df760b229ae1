"""Heartbeats between the ranks of a run: a lost rank is named, and the others do not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from .errors import RanksLostError
from .meeting import Member, connected_to, is_reset

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

BEAT_SECONDS = 1.0
SILENT_BEATS = 60
"""A rank is suspected after missing this many beats. A healthy rank can be silent for tens of seconds: a library
holds the interpreter's lock while it loads, the machine swaps, or its disk hangs."""
SCAN_SECONDS = 5.0
"""Once there is a suspicion or a failure, the ranks without a heartbeat for this long are lost."""
GRACE_SECONDS = 3.0
"""Time for the training thread to notice a loss itself. With the other times above, a killed rank has ended all others
after 12 seconds: two beats, a scan, and two beats, or LINGER_SECONDS, until all know."""
LINGER_SECONDS = 2.0
"""How long rank 0, which holds the store, stays for ranks that have yet to read the names of the lost ones."""
LEAVE_SECONDS = 0.05
"""How often rank 0 checks whether the other ranks are done."""

AsError = Callable[[str], RanksLostError]
"""Makes the error for lost ranks from their description, such as "rank 1 (host, process 7)". Called in any thread."""


class Heartbeats:
    """Every rank sends a heartbeat each second, independently of its work, and listens to the next rank's.

    A failed collective tells which connection broke, not which rank is the cause: a rank that loses its neighbour ends
    as well, and then its own neighbours do. A collective on GPUs does not even fail, and the training thread waits
    inside CUDA. So rank 0 is connected to all others: a process that ends resets its connection at once, and only one
    that hangs, or a machine that fails, has to be silent for long to be suspected. A firewall resets connections too.

    A store in rank 0's process counts the beats, so that it is gone if and only if rank 0 is. Two threads, because the
    store of a machine that has failed never answers: `_beat` may wait for it, `_watch` does not.
    """

    def __init__(
        self, store: TCPStore, rank: int, members: Sequence[Member], end: Callable[[RanksLostError], None] | None = None
    ) -> None:
        """store, members: from `meet`; a client that nothing else uses, since one that waits for a key blocks all
        threads. end: see `joined_world`.
        """
        self._store, self._rank, self._members, self._end = store, rank, members, end
        self._size = len(members)
        self._as_error: AsError = lambda lost: RanksLostError(f"lost {lost}; see its messages")
        self._lost: list[int] = []
        self._connections = {other: connected_to(member) for other, member in enumerate(members) if rank == 0 < other}
        self._suspects_loss, self._beats_unanswered = False, 0
        self.leaving, self._ended = threading.Event(), threading.Event()  # leaving: by itself, whoever is lost
        self._threads = [
            threading.Thread(target=target, name=f"thermopile-{name}", daemon=True)
            for target, name in ((self._beat, "heartbeats"), (self._watch, "watch"))
        ]

    @contextmanager
    def beating(self) -> Iterator[Self]:
        """Send heartbeats during the block; if this rank holds the store, stay until all ranks have finished theirs.

        Raises RanksLostError if the block fails because of a lost rank, or a rank is lost before it is done.
        """
        for thread in self._threads:
            thread.start()
        try:
            with self.naming_lost_ranks(self._as_error):
                yield self
            self._leave()
        finally:
            self.leaving.set()  # this rank reports its own error
            self._ended.set()
            for thread in self._threads:
                thread.join(2 * BEAT_SECONDS)  # bounded, in case the store does not answer

    @contextmanager
    def naming_lost_ranks(self, as_error: AsError) -> Iterator[None]:
        """During the block, report lost ranks by `as_error`, also in place of a RuntimeError that they caused."""
        before, self._as_error = self._as_error, as_error
        try:
            yield
        except RuntimeError as error:
            if self.lost():
                raise as_error(self._named()) from error
            raise
        finally:
            self._as_error = before

    def lost(self) -> list[int]:
        """Return the lost ranks; takes a few seconds. All ranks report the result of the first that finds any."""
        if not self._lost:
            try:
                self._lost = self._scan()
            except RuntimeError:  # the store is gone, and so is rank 0
                self._lost = [0]
        return self._lost

    def _named(self) -> str:
        """Describe the lost ranks with machine and process."""
        return " and ".join(f"rank {rank} ({self._members[rank]})" for rank in self._lost)

    def _scan(self) -> list[int]:
        if not self._store.check(["lost"]):
            before = self._beats()
            time.sleep(SCAN_SECONDS)
            after = self._beats()
            silent = [rank for rank in range(self._size) if after[rank] == before[rank] and not self._has_left(rank)]
            if not silent:
                return []
            self._store.compare_set("lost", "", ",".join(map(str, silent)))
        lost = [int(rank) for rank in self._store.get("lost").decode().split(",")]
        if self._rank == 0:
            time.sleep(LINGER_SECONDS)
        return lost

    def _beats(self) -> list[int]:
        return [self._store.add(f"beats/{rank}", 0) for rank in range(self._size)]

    def _has_left(self, rank: int) -> bool:
        return self._store.check([f"left/{rank}"])

    def _beat(self) -> None:
        """Send heartbeats, and note whether another rank may be lost."""
        listens_to, heard, silent = (self._rank + 1) % self._size, -1, 0
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._store.add(f"beats/{self._rank}", 1)
                beats = self._store.add(f"beats/{listens_to}", 0)
                heard, silent = beats, 0 if beats != heard else silent + 1
                if self._has_left(listens_to):
                    listens_to, silent = (listens_to + 1) % self._size, 0
                reset = [rank for rank, connection in self._connections.items() if is_reset(connection)]
                if silent > SILENT_BEATS or not all(map(self._has_left, reset)) or self._store.check(["lost"]):
                    self._suspects_loss = True
            except RuntimeError:  # the store is gone
                self._suspects_loss = True
                return
            self._beats_unanswered = 0

    def _watch(self) -> None:
        """Wait for a loss, then end the process if it still runs after GRACE_SECONDS."""
        while not self._notices_loss():
            if self._ended.wait(BEAT_SECONDS):
                return
        if not self.leaving.wait(GRACE_SECONDS) and self._end is not None:
            self._end(self._as_error(self._named()))

    def _notices_loss(self) -> bool:
        # Beats, not seconds: a scheduler may suspend all ranks for an hour, and no time passes between their beats.
        self._beats_unanswered += 1
        if self._beats_unanswered > SILENT_BEATS:
            self._lost = self._lost or [0]
        if self._suspects_loss:
            self._suspects_loss = False  # before the scan: a later reset needs another
            self.lost()
        return bool(self._lost)

    def _leave(self) -> None:
        """Tell the others that this rank is done. Rank 0 stays until all are done, since the store ends with it."""
        self.leaving.set()
        with suppress(RuntimeError):  # the store is gone: the others are done, or will notice
            self._store.add(f"left/{self._rank}", 1)  # unlike `set`, done when it returns: before this process ends
            while self._rank == 0 and not all(map(self._has_left, range(self._size))):
                if self._lost:
                    raise self._as_error(self._named())
                time.sleep(LEAVE_SECONDS)
