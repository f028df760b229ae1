"""The writer lock of a store in a bucket: an object that names the writer, who renews it while it lives.

It keeps a second start from disturbing the first. It is the index that keeps two writers apart (history.py): a process
that slept for long, and was replaced, finds the index to be another's.
"""

import logging
import math
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from ..files import read_regular, write_atomically
from ..lock import FileLock, LockedError, lock_holder
from ..objects import Address
from ..places import local_folder
from ..sealed_json import seal_line, unseal

BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""A writer that was not heard of for this long is dead: its lock may be taken."""
_LEAVE_SECONDS = 10.0
"""How long `release` waits for the store; a lock that stays is taken from the dead."""
_MAX_BYTES = 10_000
_FREE = b"\n"

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
        """Machine and folder, which has one holder at a time."""
        return self.name.partition(" on ")[2], self.folder


class BucketLock:
    """Held from construction until `release`. writer: the name of this holding, which no other has.

    Raises LockedError if another process holds it: at once on the same machine; elsewhere once a beat of it was seen,
    for which a lock that a killed process may have left is watched for SILENT_SECONDS. Raises OSError.
    """

    def __init__(self, address: Address, folder: Path) -> None:
        """folder: for local files of what the lock is for; a process there keeps others of this machine out."""
        self.writer = token_hex(16)
        self._address, self._ended = address, threading.Event()
        self._local = FileLock(folder / address.name)
        try:
            self._holder = _Holder(
                name=f"pid {os.getpid()} on {socket.gethostname()}", since=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
                folder=_id_of(folder), writer=self.writer,
            )  # fmt: skip
            self._version = self._taken()
        except BaseException:
            self._local.release()
            raise
        # Ends with the process, however that ends: beats of a process that does nothing else would mislead.
        self._thread = threading.Thread(target=self._beat, name="thermopile-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._ended.set()
        self._thread.join(_LEAVE_SECONDS)
        self._local.release()

    def _taken(self) -> str:
        try:
            return self._address.create(self._text())
        except FileExistsError:
            pass
        version = self._awaited()
        try:
            return self._address.replace(self._text(), version)
        except FileExistsError:
            raise LockedError("another process, which has just begun") from None

    def _awaited(self) -> str:
        """Return the version of the lock of a holder that is gone. Raises LockedError if it lives."""
        text, version = self._address.read_version(_MAX_BYTES)
        holder = _parsed(text)
        # This process holds the local lock of that folder, so no other on this machine has it.
        if text == _FREE or (holder and holder.place == self._holder.place):
            return version
        name = f"{holder.name}, since {holder.since}" if holder else "another process"
        _log.warning("%s is held by %s; waiting for %.0f s to see whether it still runs", self._address, name,
                     SILENT_SECONDS)  # fmt: skip
        silent = 0.0
        while silent < SILENT_SECONDS:
            time.sleep(BEAT_SECONDS / 5)
            asked = time.monotonic()
            text, now = self._address.read_version(_MAX_BYTES)
            if text == _FREE:
                return now
            if now != version:
                raise LockedError(name)
            # While the store is away, the holder cannot renew it either: begin again.
            silent = silent + BEAT_SECONDS / 5 if time.monotonic() - asked < BEAT_SECONDS else 0.0
        return version

    def _text(self) -> bytes:
        return seal_line(self._holder.model_dump()) + b"\n"

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._holder.beats += 1
            with suppress(OSError):  # the store is away; Address has said so
                if not self._renewed(self._text()):
                    return
        with suppress(OSError):
            self._renewed(_FREE)

    def _renewed(self, text: bytes) -> bool:
        """Write the lock, and return whether it is still this process's."""
        try:
            self._version = self._address.replace(text, self._version)
        except FileExistsError:  # or written by this process, which did not get the answer
            there, self._version = self._address.read_version(_MAX_BYTES)
            holder = _parsed(there)
            return holder is not None and holder.writer == self.writer
        return True


class LockStatus(NamedTuple):
    """What a lock says. holder: `pid N on HOST`, None if free. age: seconds since it was renewed; inf if killed."""

    holder: str | None
    age: float

    @property
    def is_held(self) -> bool:
        return self.holder is not None and self.age < SILENT_SECONDS


def lock_status(address: Address) -> LockStatus:
    """Read the lock. Raises OSError if the store fails."""
    try:
        text, written = address.read(_MAX_BYTES), address.modified()
    except FileNotFoundError:
        return LockStatus(None, 0.0)
    holder = _parsed(text)
    folder = local_folder(address.parent)
    # In the holder's own folder, a process that lives holds the local lock.
    if holder and holder.folder == _known_id(folder) and not lock_holder(folder / address.name)[1]:
        return LockStatus(holder.name, math.inf)
    age = max(0.0, time.time() - written)  # another machine's clock may be ahead
    return LockStatus(None if text == _FREE else holder.name if holder else "another process", age)


def _parsed(text: bytes) -> _Holder | None:
    try:
        return _Holder.model_validate(unseal(text))
    except ValueError:  # also what pydantic and sealed_json raise
        return None


def _id_of(folder: Path) -> str:
    """Return the random id of a folder, which is made if there is none. Only under the folder's lock."""
    if (known := _known_id(folder)) is None:
        write_atomically(folder / "id", (known := token_hex(16)).encode())
    return known


def _known_id(folder: Path) -> str | None:
    with suppress(FileNotFoundError):
        if len(found := read_regular(folder / "id", 100).decode("ascii", "replace").strip()) == 32:
            return found
    return None
