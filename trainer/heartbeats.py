"""Heartbeats between the ranks of a run: a lost rank is named, and the others do not wait for it."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

from .errors import RanksLostError
from .meeting import RankProcess

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
"""How long rank 0, which counts the beats, stays for ranks that have yet to read the names of the lost ones."""

AsError = Callable[[str], RanksLostError]
"""Makes the error for lost ranks from their description, such as "rank 1 (host, process 7)". Called in any thread."""
End = Callable[[RanksLostError], None]


class _Known(NamedTuple):
    """Reports that rank 0 has received, by rank; and the lost ranks."""

    beats: list[int]
    left: list[bool]
    lost: list[int]


class Heartbeats:
    """Every rank sends a heartbeat each second, independently of its work, and listens to the next rank's.

    A failed collective tells which connection broke, not which rank is the cause: a rank that loses its neighbour ends
    as well, and then its own neighbours do. A collective on GPUs does not even fail, and the training thread waits
    inside CUDA. So rank 0 is connected to all others: the connection of a process that ends closes at once, and only
    one that hangs, or a machine that fails, has to be silent for long to be suspected.

    Rank 0's process counts the beats, so that the counts are gone if and only if rank 0 is. Two threads, because the
    process of a machine that has failed never answers: `_beat` may wait for it, `_watch` does not.
    """

    def __init__(
        self, rank: int, members: Sequence[RankProcess], connections: Mapping[int, Connection], end: End | None = None
    ) -> None:
        """members, connections: from `meet`. end: see `joined_world`."""
        self._rank, self._members, self._to, self._end = rank, members, connections, end
        self._size, self._turn = len(members), threading.Lock()
        self._known = _Known([0] * self._size, [False] * self._size, [])
        self._as_error: AsError = lambda lost: RanksLostError(f"lost {lost}; see its messages")
        self._lost: list[int] = []
        self._suspects_loss, self._beats_unanswered = False, 0
        self.leaving, self._ended = threading.Event(), threading.Event()  # leaving: by itself, whoever is lost
        self._threads = [
            threading.Thread(target=target, name=f"thermopile-{name}", daemon=True)
            for target, name in ((self._beat, "heartbeats"), (self._watch, "watch"))
        ]
        for other in connections if rank == 0 else ():
            threading.Thread(target=self._answer, args=(other,), name="thermopile-answers", daemon=True).start()

    @contextmanager
    def beating(self) -> Iterator[Self]:
        """Send heartbeats during the block; if this rank counts them, stay until all ranks have finished theirs.

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
                thread.join(2 * BEAT_SECONDS)  # bounded, in case rank 0 does not answer

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
            except RuntimeError:  # rank 0 has ended
                self._lost = [0]
        return self._lost

    def _named(self) -> str:
        """Describe the lost ranks with machine and process."""
        return " and ".join(f"rank {rank} ({self._members[rank]})" for rank in self._lost)

    def _scan(self) -> list[int]:
        before, silent = self._tell(), list[int]()
        if not before.lost:
            time.sleep(SCAN_SECONDS)
            after = self._tell()
            silent = [rank for rank in range(self._size) if after.beats[rank] == before.beats[rank]]
            silent = [rank for rank in silent if not after.left[rank]]
            if not silent:
                return []
        lost = self._tell(lost=silent).lost
        if self._rank == 0:
            time.sleep(LINGER_SECONDS)
        return lost

    def _tell(self, beats: int = 0, left: bool = False, lost: Sequence[int] = ()) -> _Known:
        """Tell rank 0 about this rank, and return what it knows of all. Raises RuntimeError if it has ended."""
        if self._rank == 0:
            return self._noted(0, beats, left, lost)
        try:
            with self._turn:
                self._to[0].send_bytes(json.dumps([beats, left, lost]).encode())
                return _Known(*json.loads(self._to[0].recv_bytes()))
        except (OSError, EOFError) as error:
            raise RuntimeError("rank 0 has ended") from error

    def _answer(self, rank: int) -> None:
        with suppress(OSError, EOFError):  # it has ended
            while True:
                known = self._noted(rank, *json.loads(self._to[rank].recv_bytes()))
                self._to[rank].send_bytes(json.dumps(known).encode())
        if not self._known.left[rank]:
            self._suspects_loss = True

    def _noted(self, rank: int, beats: int, left: bool, lost: Sequence[int]) -> _Known:
        with self._turn:
            self._known.beats[rank] += beats
            self._known.left[rank] |= left
            self._known.lost.extend(() if self._known.lost else lost)
            return _Known([*self._known.beats], [*self._known.left], [*self._known.lost])

    def _beat(self) -> None:
        """Send heartbeats, and note whether another rank may be lost."""
        listens_to, heard, silent = (self._rank + 1) % self._size, -1, 0
        while not self._ended.wait(BEAT_SECONDS):
            try:
                known = self._tell(beats=1)
                beats = known.beats[listens_to]
                heard, silent = beats, 0 if beats != heard else silent + 1
                if known.left[listens_to]:
                    listens_to, silent = (listens_to + 1) % self._size, 0
                if silent > SILENT_BEATS or known.lost:
                    self._suspects_loss = True
            except RuntimeError:  # rank 0 has ended
                self._suspects_loss = True
                return
            self._beats_unanswered = 0

    def _watch(self) -> None:
        """Wait for a loss, then end the process if it still runs after GRACE_SECONDS."""
        while not self._lost:
            if self._ended.wait(BEAT_SECONDS):
                return
            # Beats, not seconds: a scheduler may suspend all ranks for an hour, and no time passes between their beats.
            self._beats_unanswered += 1
            if self._beats_unanswered > SILENT_BEATS:
                self._lost = self._lost or [0]
            if self._suspects_loss:
                self._suspects_loss = False  # before the scan: a later end needs another
                self.lost()
        if not self.leaving.wait(GRACE_SECONDS) and self._end is not None:
            self._end(self._as_error(self._named()))

    def _leave(self) -> None:
        """Tell the others that this rank is done. Rank 0 stays until all are done, since the counts end with it."""
        self.leaving.set()
        with suppress(RuntimeError):  # rank 0 has ended: the others are done, or will notice
            known = self._tell(left=True)
            while self._rank == 0 and not all(known.left):
                if self._lost:
                    raise self._as_error(self._named())
                time.sleep(0.05)
                known = self._tell()
