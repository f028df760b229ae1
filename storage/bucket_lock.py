"""The writer lock of a store in a bucket: an object that names the writer and that the writer renews while it lives.

It is a lease: a writer that was cut off sends no request before it knows that it still holds the lock. Its earlier
requests may arrive at any time but change nothing of its successor's: names and conditions keep their objects apart
(docs/state_store.md).
"""

import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from .bucket import Address
from .files import read_regular, write_atomically
from .lock import FileLock, LockedError, LockStatus, TakenOverError, lock_holder
from .sealed_json import seal_line, unseal

BEAT_SECONDS = 10.0
LEASE_SECONDS = 25.0
"""A confirmed renewal holds for this long after it was sent. A request that begins at its end finishes before another
process may take the lock: LEASE_SECONDS + REQUEST_SECONDS < SILENT_SECONDS."""
SILENT_SECONDS = 60.0
"""A writer silent for this long counts as dead: its lock may be taken."""
_MAX_BYTES = 10_000
_FREE = re.compile(rb"(?:free ([0-9a-f]{32}))?\n")
"""A released lock with its last writer; earlier versions left the writer out."""

_log = logging.getLogger(__name__)


class _Holder(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: Annotated[str, Field(pattern="^pid [0-9]{1,20} on [!-~]{1,255}$")]
    since: Annotated[str, Field(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2} UTC$")]
    folder: str
    """Random id of the holder's folder of local files."""
    writer: str
    beats: int = 0

    @property
    def place(self) -> tuple[str, str]:
        """Machine and folder, which have one holder at a time."""
        return self.name.partition(" on ")[2], self.folder


class BucketLock:
    """Held from construction until `release`; a Lease.

    writer: unique name of this holding. It begins with `term`, which counts holdings.
    Raises LockedError if another process holds it: at once on the same machine, otherwise once its heartbeat is seen.
    A lock that a killed process may have left is watched for SILENT_SECONDS. Raises OSError.
    """

    def __init__(
        self,
        address: Address,
        folder: Path,
        lost: Callable[[], TakenOverError],
        last_writer: str | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        """folder: local working files; a process that holds it keeps others on this machine out.

        lost: makes the error for a holder whose lock was taken. last_writer: the last known writer, in case someone
        deleted the lock. quiet: do not log that the lock is watched.
        """
        self._level = logging.DEBUG if quiet else logging.WARNING
        self._lost_error = lost
        self._address, self._ended, self._renewing = replace(address, patience=0.0), threading.Event(), threading.Lock()
        self._until, self._lost = 0.0, False
        self._local = FileLock(folder / address.name)
        try:
            if (folder_id := _known_id(folder)) is None:
                write_atomically(folder / "id", (folder_id := token_hex(16)).encode())
            self._holder = _Holder(
                name=f"pid {os.getpid()} on {socket.gethostname()}",
                since=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
                folder=folder_id,
                writer=_writer_after(last_writer),
            )
            self._version = self._taken(address, last_writer)
        except BaseException:
            self._local.release()
            raise
        # A daemon, which ends with the process however that ends: heartbeats without other work would mislead.
        self._thread = threading.Thread(target=self._beat, name="thermopile-lock", daemon=True)
        self._thread.start()

    @property
    def writer(self) -> str:
        return self._holder.writer

    @property
    def term(self) -> str:
        return self.writer[:8]

    def confirm(self, seconds: float) -> None:
        if _now() + seconds < self._until:
            return
        with self._renewing:
            if _now() + seconds >= self._until:
                self._renew()

    def release(self) -> None:
        self._ended.set()
        self._thread.join(10.0)  # if the lock stays, the next writer takes it as a dead writer's
        self._local.release()

    def _taken(self, address: Address, last_writer: str | None) -> str:
        with suppress(FileExistsError):
            return address.create(self._text())
        before, version = self._awaited(address)
        self._holder.writer = _writer_after(max(before or "", last_writer or ""))
        try:
            return address.replace(self._text(), version)
        except FileExistsError:
            raise LockedError("another process, which has just begun") from None

    def _awaited(self, address: Address) -> tuple[str | None, str]:
        """Return the writer and version of a dead holder's lock. Raises LockedError if the holder lives."""
        text, version = address.read_version(_MAX_BYTES)
        holder = _parsed(text)
        # This process holds that folder's local lock, so no other process on this machine holds this lock.
        if _FREE.fullmatch(text) or (holder and holder.place == self._holder.place):
            return _writer_in(text), version
        name = f"{holder.name}, since {holder.since}" if holder else "another process"
        words = "%s is held by %s; waiting for %.0f s to see whether it still runs"
        _log.log(self._level, words, address, name, SILENT_SECONDS)
        silent = 0.0
        while silent < SILENT_SECONDS:
            time.sleep(BEAT_SECONDS / 5)
            asked = time.monotonic()
            text, now = address.read_version(_MAX_BYTES)
            if _FREE.fullmatch(text):
                return _writer_in(text), now
            if now != version:
                raise LockedError(name)
            # While the store is unreachable, the holder cannot renew either: restart the count.
            silent = silent + BEAT_SECONDS / 5 if time.monotonic() - asked < BEAT_SECONDS else 0.0
        return _writer_in(text), version

    def _text(self) -> bytes:
        return seal_line(self._holder.model_dump()) + b"\n"

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                with self._renewing:
                    self._renew()
            except TakenOverError:
                return
            except OSError:  # the store is unreachable; the next request will say so
                pass
        with suppress(OSError, TakenOverError), self._renewing:
            self._until = 0.0
            try:
                self._write(f"free {self.writer}\n".encode())
            finally:
                self._lost = True

    def _renew(self) -> None:
        """Renew the lock, counting from when the confirmed request was sent. Only while `_renewing` is held."""
        self._holder.beats += 1
        self._until = self._write(self._text()) + LEASE_SECONDS

    def _write(self, text: bytes) -> float:
        """Write the lock if it is still this process's; return when the request was sent."""
        if self._lost:
            raise self._lost_error()
        sent = _now()
        try:
            self._version = self._address.replace(text, self._version)
        except FileExistsError:  # or by this process, which missed the answer
            try:
                there, self._version = self._address.read_version(_MAX_BYTES)
            except FileNotFoundError:  # deleted by hand
                self._version = self._address.create(text)
            else:
                self._lost = _writer_in(there) != self.writer
            return self._write(text)
        return sent


def bucket_lock_status(address: Address) -> LockStatus:
    """Read the lock. age: inf if its holder was killed. Raises OSError if the store fails."""
    try:
        text, written = address.read_bytes(_MAX_BYTES), address.modified()
    except FileNotFoundError:
        return LockStatus(None, False, 0.0, True)
    holder = _parsed(text)
    folder = address.parent.scratch
    # In the holder's own folder, a live process holds the local lock.
    if holder and holder.folder == _known_id(folder) and not lock_holder(folder / address.name)[1]:
        return LockStatus(holder.name, False, math.inf, True)
    age = max(0.0, time.time() - written)  # another machine's clock may be ahead
    name = None if _FREE.fullmatch(text) else holder.name if holder else "another process"
    return LockStatus(name, name is not None and age < SILENT_SECONDS, age, True)


def _writer_in(text: bytes) -> str | None:
    """Return the last writer that the lock text names; None if unknown."""
    if free := _FREE.fullmatch(text):
        return (free[1] or b"").decode() or None
    holder = _parsed(text)
    return holder.writer if holder and re.fullmatch("[0-9a-f]{32}", holder.writer) else None


def _now() -> float:
    """Return the seconds since boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _writer_after(writer: str | None) -> str:
    """Return a name for the next holding."""
    return f"{min(int(writer[:8], 16) + 1, 0xFFFFFFFF) if writer else 1:08x}{token_hex(12)}"


def _parsed(text: bytes) -> _Holder | None:
    try:
        return _Holder.model_validate(unseal(text))
    except ValueError:  # also raised by pydantic and sealed_json
        return None


def _known_id(folder: Path) -> str | None:
    with suppress(FileNotFoundError):
        if len(found := read_regular(folder / "id", 100).decode("ascii", "replace").strip()) == 32:
            return found
    return None
