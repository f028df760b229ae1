"""Objects in an S3 store, by their addresses: `s3://bucket/path`.

Credentials, region and endpoint come from the environment only (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION,
AWS_ENDPOINT_URL, or what the machine's role gives), so no setting, log or report ever holds them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from random import random
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Event, Lock
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Literal, Protocol, TypeVar

from .files import MAX_TEXT_BYTES, own_directory
from .local import LocalPath

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta, UpdateVersion
    from obstore.store import S3Store

PATIENCE_SECONDS = 150.0
"""An operation is repeated for this long while the store is away or failing."""
RANGE_BYTES = 8 << 20
"""Large objects are read in ranges of this size, side by side: each is a request that can be repeated by itself."""
SIDE_BY_SIDE = 8
"""Ranges of an object, or files of a history, that are read at once."""
REQUEST_SECONDS = 30.0
"""A request takes no longer."""
_PART_SECONDS = 4.0
"""The client repeats a part of a large object for this long if there is a lease."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_TOLD_AFTER_SECONDS = 5.0

SCRATCH = "THERMOPILE_SCRATCH"
"""Environment variable: the folder for working files of what is in buckets; else `~/.cache/thermopile`."""
_MARKS = ".ranks"

_ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?")
_NO_BUCKET = "The specified bucket does not exist"
_log = logging.getLogger(__name__)
_telling, _told_at = Lock(), dict[tuple[str, str | None], float]()
"""When an outage of a bucket at an endpoint was last told of."""
_NEVER = Event()
T = TypeVar("T")


class AddressError(ValueError):
    """The text is not an address of an object."""


class MissingBucketError(FileNotFoundError):
    """There is no such bucket."""


class ObjectStoreError(OSError):
    """The object store cannot be reached, or refuses what was asked of it."""


class ObjectTooLargeError(OSError):
    """The object is larger than what was to be read."""


class Lease(Protocol):
    """The right to change what is below an address. Another process may take it from one that was cut off."""

    @property
    def term(self) -> str:
        """Number of the holding, 8 hexadecimal digits: part of the names of objects that may only be its own."""

    def confirm(self, seconds: float) -> None:
        """Return if the right lasts for `seconds`; renew it first if it may not. Called before every request.

        Raises the holder's own error once another process has it, and OSError while the store is away.
        """


@dataclass(frozen=True)
class Address:
    """The place of an object, or of all objects below it; joined and shown as a path is.

    Its methods raise FileNotFoundError for a missing object or bucket, PermissionError, ObjectStoreError if the store
    fails for longer than `patience`, and what the lease raises. They are safe to call from several threads.
    """

    is_remote: ClassVar[bool] = True
    keeps_copies: ClassVar[bool] = True
    noun: ClassVar[str] = "address"
    occupied: ClassVar[str] = "has objects below it; choose another address"
    sharing: ClassVar[str] = "set the same AWS_ENDPOINT_URL on all machines"

    bucket: str
    key: str
    """Path in the bucket, without slashes at its ends; empty for the bucket itself."""
    lease: Lease | None = field(default=None, compare=False, repr=False)
    """Confirmed before each request, also a repeated one or a listing: by its answer something may be deleted."""
    patience: float | None = field(default=None, compare=False, repr=False)
    """Seconds; None: PATIENCE_SECONDS."""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises AddressError unless the text is `s3://bucket` or `s3://bucket/path`."""
        scheme, _, rest = text.partition("://")
        if {"@", ":"} & {*rest.split("/")[0]}:  # a secret may hold slashes; it is not repeated, as this may be logged
            raise AddressError(
                f"a {scheme}:// address must not hold credentials or a port; set AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL in the environment"
            )
        found = _ADDRESS.fullmatch(text)
        key = (found[2] or "").strip("/") if found else ""
        if not found or (key and {"", ".", ".."} & {*key.split("/")}) or not key.isprintable():
            raise AddressError(f"{text!r} is not an address; write s3://bucket/path")
        return cls(found[1], key)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}" if self.key else f"s3://{self.bucket}"

    def __truediv__(self, name: str) -> Address:
        return dataclasses.replace(self, key=f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Address:
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    def resolve(self) -> Address:
        """Return the address, which is absolute, as paths become by this."""
        return self

    absolute = resolve

    def with_name(self, name: str) -> Address:
        return self.parent / name

    def read_bytes(self, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
        """Return an object's bytes. Raises OSError if it has more than `max_bytes`."""
        return self.read_version(max_bytes)[0]

    def read_version(self, max_bytes: int = MAX_TEXT_BYTES) -> tuple[bytes, str]:
        """Return an object's bytes and the version that `replace` expects."""
        data, found = self.read_described(max_bytes)
        return data, found["e_tag"] or ""

    def read_described(self, max_bytes: int = MAX_TEXT_BYTES) -> tuple[bytes, ObjectMeta]:
        """Return an object's bytes and what the store says of it, such as `last_modified`. Raises as `read_bytes`."""

        def get() -> tuple[bytes, ObjectMeta]:
            from obstore import get

            found = get(_store(self.bucket), self.key)
            if (size := found.meta["size"]) > max_bytes:
                raise ObjectTooLargeError(
                    f"{self} has {size:,} bytes, above the limit for such an object, {max_bytes:,}"
                )
            return bytes(found.bytes()), found.meta

        return self._repeated(get)

    def read_range(self, start: int, length: int, ended: Event = _NEVER, version: str = "") -> bytes:
        """Return `length` bytes from `start` on; fewer where the object ends, which must be behind `start`.

        ended: once it is set, a failing store is an error at once. version: raise FileExistsError if it has another.
        """

        def get_range() -> bytes:
            from obstore import get
            from obstore.exceptions import PreconditionError

            options: GetOptions = {"range": (start, start + length)}
            if version:
                options["if_match"] = version
            try:
                return bytes(get(_store(self.bucket), self.key, options=options).bytes())
            except PreconditionError:
                raise FileExistsError(f"{self} was replaced by another object") from None

        return self._repeated(get_range, ended)

    def size(self) -> int:
        """Return an object's size in bytes."""
        return self.version()[0]

    def version(self) -> tuple[int, str]:
        """Return an object's size in bytes, and its version as in `read_version`."""
        found = self._described()
        return found["size"], found["e_tag"] or ""

    def modified(self) -> float:
        """Return when an object was written, by the store's clock, in seconds since 1970."""
        return self._described()["last_modified"].timestamp()

    def _described(self) -> ObjectMeta:
        def head() -> ObjectMeta:
            from obstore import head

            return head(_store(self.bucket), self.key)

        return self._repeated(head)

    def exists(self) -> bool:
        """Return whether there is an object at this very address."""
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    def download(self, file: BinaryIO) -> int:
        """Write the object to an empty file, in ranges side by side; return its size."""
        size = self.size()

        def copy(start: int) -> None:
            data = self.read_range(start, min(RANGE_BYTES, size - start))
            while data:
                written = os.pwrite(file.fileno(), data, start)
                data, start = data[written:], start + written

        with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
            for _ in threads.map(copy, range(0, size, RANGE_BYTES)):
                pass
        return size

    def write(self, data: bytes | Path) -> str:
        """Write an object whole, of these bytes or of a file's, and return its version; it replaces one that is there.

        Readers see the old object or the new one, never a part: a store publishes an object when it is complete.
        """

        def put() -> str:
            from obstore import put

            size = len(data) if isinstance(data, bytes) else data.stat().st_size
            if size <= RANGE_BYTES:
                whole = data if isinstance(data, bytes) else data.read_bytes()
                return put(_store(self.bucket), self.key, whole, use_multipart=False)["e_tag"] or ""
            # Were parts not repeated one by one, a store that fails now and then would never take them all.
            store = _store(self.bucket, PATIENCE_SECONDS if self.lease is None else _PART_SECONDS)
            return put(store, self.key, self._pieces(data))["e_tag"] or ""

        return self._repeated(put)

    def _pieces(self, data: bytes | Path) -> Iterator[bytes]:
        """Yield data in the parts in which it is sent, each once it may be sent and repeated."""
        opened = BytesIO(data) if isinstance(data, bytes) else data.open("rb")
        with opened, ThreadPoolExecutor(1) as thread:
            while piece := opened.read(RANGE_BYTES):
                if self.lease is not None:  # in a thread, since a call of obstore within another one panics
                    thread.submit(self.lease.confirm, _PART_SECONDS).result()
                yield piece

    def rewrite(self, data: bytes) -> None:
        """Write a small object in place of the version that is there now, or of none.

        An earlier writer's request that is still under way then does not replace it.
        """
        while True:
            with suppress(FileExistsError):  # by such a request, between these two
                try:
                    self.replace(data, self.version()[1])
                except FileNotFoundError:
                    self.create(data)
                return

    def create(self, data: bytes) -> str:
        """Write an object unless there is one, and return its version. Raises FileExistsError if there is one."""
        return self._written_if("create", data)

    def replace(self, data: bytes, version: str) -> str:
        """Write an object in place of that version, and return the new one. Raises FileExistsError if it has another.

        version: from `read_version`, `create` or `replace`.
        """
        return self._written_if({"e_tag": version}, data)

    def _written_if(self, mode: Literal["create"] | UpdateVersion, data: bytes) -> str:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        attempts = 0

        def put() -> str:
            from obstore import put

            nonlocal attempts
            attempts += 1
            try:
                return put(_store(self.bucket), self.key, data, mode=mode, use_multipart=False)["e_tag"] or ""
            except (AlreadyExistsError, PreconditionError):
                there, its_version = self._as_it_is(len(data))
                # An attempt whose answer was lost may have been the one that wrote it.
                if attempts > 1 and there == data:
                    return its_version
                if its_version == (mode["e_tag"] if isinstance(mode, dict) else ""):
                    raise  # such an attempt is still under way; this one is repeated
                raise FileExistsError(f"{self} was written by another process") from None

        return self._repeated(put)

    def _as_it_is(self, length: int) -> tuple[bytes | None, str]:
        """Return bytes and version; no bytes if there are not `length`, and an empty version if there is none."""
        try:
            size, version = self.version()
            return self.read_version(length) if size == length else (None, version)
        except FileNotFoundError:
            return None, ""

    def supersede(self, data: bytes, version: str | None) -> None:
        """Write an object in place of the version that was read; None: of none, or of what an earlier writer left.

        Raises FileExistsError if there is another.
        """
        if version is not None:
            self.replace(data, version)
        elif self.lease:
            self.rewrite(data)
        else:
            self.create(data)

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open a copy of an object of any size for reading."""
        with TemporaryFile() as copy:
            self.download(copy)
            yield copy

    def delete(self) -> None:
        """Delete an object; one that is missing is no error."""
        self._repeated(partial(_delete, self.bucket, self.key))

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects below this address, a thousand in a request; missing ones are no error."""
        keys = [(self / name).key for name in names]
        for start in range(0, len(keys), 1000):
            self._repeated(partial(_delete, self.bucket, keys[start : start + 1000]))

    def is_missing(self) -> bool:
        """Return whether there is no object."""
        return not self.exists()

    is_present = exists
    is_file = exists

    def is_folder(self) -> bool:
        """Return True: an address may have any number of objects below it."""
        return True

    def holds(self, index: str) -> bool:
        """Return whether the folder below this address is whole: it has the object that is written last."""
        return (self / index).exists()

    is_taken = holds

    def names(self) -> list[str]:
        """Return the names of the objects directly below this address, in any order."""
        return [name for name, _ in self.objects() if "/" not in name]

    def irregular_names(self) -> Iterator[str]:
        """Yield nothing: an object is a regular file."""
        return iter(())

    def half_written(self) -> list[str]:
        """Return nothing: an object that was not written whole does not exist."""
        return []

    def content(self) -> Iterator[str]:
        """Yield the first part of the names of the first hundred objects below this address."""
        return (name.partition("/")[0] for name, _ in islice(self.objects(), 100))

    def matching(self, pattern: str) -> Iterator[Address]:
        """Yield the objects below this address whose names end as a pattern `*.end` says; one that does so, itself."""
        end = pattern.removeprefix("*")
        if self.name.endswith(end):
            yield self
        else:
            yield from (self / name for name, _ in self.objects() if name.endswith(end))

    def size_below(self) -> int:
        """Return the bytes of all objects below this address."""
        return sum(size for _, size in self.objects())

    def make(self) -> list[Path]:
        """Do nothing: objects need no folders."""
        return []

    @contextmanager
    def built(self) -> Iterator[Address]:
        """Yield this address: what is built counts once the object that `holds` asks for is written, the last one."""
        yield self

    def refuse_link(self) -> None:
        """Do nothing: no object is a link."""

    refuse_foreign_folder = refuse_foreign_file = refuse_link

    def written_through(self) -> AbstractContextManager[None]:
        """Do nothing: an object lasts once its request succeeds."""
        return nullcontext()

    def remove_leftovers(self) -> None:
        """Remove the marks that killed ranks left."""
        marks = self / _MARKS
        marks.remove([name for name, _ in marks.objects()])

    def mark(self, name: str) -> None:
        """Write an empty object by which other machines see that they share this place."""
        (self / f"{_MARKS}/{name}.partial").create(b"")

    def sees_mark(self, name: str) -> bool:
        """Return whether another machine's mark is there."""
        return (self / f"{_MARKS}/{name}.partial").exists()

    def unmark(self, name: str) -> None:
        """Remove a mark."""
        (self / f"{_MARKS}/{name}.partial").delete()

    @property
    def scratch(self) -> LocalPath:
        """The folder of this machine for working files of what is here; it may not exist yet."""
        digest = hashlib.sha256(str(self).encode()).hexdigest()[:12]
        return _scratch() / f"{self.name or self.bucket}-{digest}"

    def made_scratch(self) -> LocalPath:
        """Return `scratch` after making it. Raises NotRegularFileError if it is a link."""
        folder = self.scratch
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        own_directory(folder)
        return folder

    @contextmanager
    def on_this_machine(self, names: Iterable[str]) -> Iterator[LocalPath]:
        """Yield a folder of this name with copies of these objects; it is removed afterwards."""
        scratch = _scratch()
        scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryDirectory(prefix="thermopile-", dir=scratch) as temporary:
            copy = LocalPath(temporary) / self.name
            copy.mkdir()
            for name in names:
                with (copy / name).open("xb") as file:
                    (self / name).download(file)
            yield copy

    def output(self, name: str) -> LocalPath:
        """Return where a report on what is here is written unless the user says otherwise: in the working directory."""
        return LocalPath(f"{name}-{self.name or self.bucket}")

    def objects(self) -> Iterator[tuple[str, int]]:
        """Yield path and size in bytes of every object below this address, sorted by path; paths begin below it.

        The listing is read in pages of a thousand.
        """
        return ((path, size) for path, size, _ in self.listing())

    def listing(self) -> Iterator[tuple[str, int, str]]:
        """Yield what `objects` does, and each object's version, as `write` returns it."""
        prefix, after = f"{self.key}/" if self.key else "", None

        def page() -> Sequence[ObjectMeta]:
            from obstore import list as list_objects

            return next(list_objects(_store(self.bucket), prefix, offset=after, chunk_size=1000), [])

        while found := self._repeated(page):
            yield from ((each["path"][len(prefix) :], each["size"], each["e_tag"] or "") for each in found)
            after = found[-1]["path"]

    def _repeated(self, operation: Callable[[], T], ended: Event = _NEVER) -> T:
        """Return what the operation returns; repeat it while the store is away or failing, until `ended` is set."""
        from obstore.exceptions import BaseError

        started, pause = time.monotonic(), _FIRST_PAUSE
        patience = PATIENCE_SECONDS if self.patience is None else self.patience
        while True:
            try:
                if self.lease is not None:
                    self.lease.confirm(0.0)
                return operation()
            except FileNotFoundError as error:
                raise self._missing(error) from None
            except (BaseError, ObjectStoreError) as error:
                if _NO_BUCKET in str(error):  # in answer to a listing
                    raise self._missing(error) from None
                waited = time.monotonic() - started
                if not _may_pass(error) or waited + pause > patience or ended.is_set():
                    raise _as_os_error(self, error) from error
                if waited > _TOLD_AFTER_SECONDS and self._is_first_to_tell():
                    _log.warning("%s; trying again for up to %.0f s", _as_os_error(self, error), patience)
            ended.wait(pause * (0.5 + random()))  # clients that failed together do not come back together
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _is_first_to_tell(self) -> bool:
        """Return whether no other operation has told of this outage: many may be under way."""
        store, now = (self.bucket, endpoint_url()), time.monotonic()
        with _telling:
            before = _told_at.get(store)
            if before is not None and now - before < PATIENCE_SECONDS:
                return False
            _told_at[store] = now
        return True

    def _missing(self, error: Exception) -> FileNotFoundError:
        if _NO_BUCKET in str(error):
            return MissingBucketError(f"{self}: there is no bucket {self.bucket}")
        return FileNotFoundError(f"{self} does not exist")


def _delete(bucket: str, keys: str | Sequence[str]) -> None:
    from obstore import delete

    delete(_store(bucket), keys)


def is_address(text: str) -> bool:
    """Return whether a text is meant as an address rather than a path."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text) is not None


def endpoint_url() -> str | None:
    """Return the store's endpoint that the environment names; None: Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _scratch() -> LocalPath:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return LocalPath(os.environ.get(SCRATCH) or Path(cache) / "thermopile").absolute()


@lru_cache(maxsize=64)
def _store(bucket: str, repeat_seconds: float = 0.0) -> S3Store:
    """repeat_seconds: for which the client repeats a request; 0: `_repeated` does it, for all failures alike."""
    from obstore.store import S3Store

    endpoint = endpoint_url()
    return S3Store(
        bucket,
        client_options={
            "allow_http": (endpoint or "").startswith("http://"),
            "timeout": timedelta(seconds=REQUEST_SECONDS),
        },
        retry_config={"max_retries": 20 if repeat_seconds else 0, "retry_timeout": timedelta(seconds=repeat_seconds)},
        endpoint=endpoint,
    )


def _may_pass(error: Exception) -> bool:
    """Return whether an operation that failed with this error may succeed if it is repeated."""
    from obstore.exceptions import AlreadyExistsError, GenericError, JoinError, PreconditionError

    # A status of 4xx other than "slow down" is final.
    status = re.search(r"status code: (4\d\d)", str(error))
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return True  # `_written_if` lets them pass only then
    of_store = isinstance(error, GenericError | JoinError | ObjectStoreError)
    return of_store and (status is None or status[1] in ("408", "429"))


def without_credentials(text: str) -> str:
    """Return a text without the user and password of the URLs in it: an endpoint may hold them."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def _as_os_error(address: Address, error: Exception) -> OSError:
    """Return an error of one line."""
    if isinstance(error, OSError):
        return error
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    reason = " ".join(str(error).partition("\n\nDebug source")[0].split())
    reason = without_credentials(re.sub(r"<\?xml.*?(?:<Message>(.*?)</Message>.*|$)", r"\1", reason))[:300]
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return PermissionError(
            f"{address}: access denied: {reason}. Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
            "and the rights that they give"
        )
    return ObjectStoreError(f"{address} cannot be used: {reason}. Check AWS_ENDPOINT_URL, AWS_REGION and the network")


def is_away(error: OSError) -> bool:
    """Return whether a store could not be used: this says nothing about the object."""
    return isinstance(error, ObjectStoreError | PermissionError)
