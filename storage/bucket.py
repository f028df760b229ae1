"""Objects in a store of Amazon (or another S3), Google or Azure: `s3://bucket/path`, `gs://…`, `az://container/path`.

Credentials, region and endpoint come from the environment only (variables and files of the cloud's own tools, or the
machine's role), so no setting, log or report ever holds them.
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

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store, from_url

from . import bucket_errors
from .amazon import endpoint_url, has_own_host, profile_credentials, region
from .files import MAX_TEXT_BYTES, own_directory, user_cache
from .local import LocalPath

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

PATIENCE_SECONDS = 150.0
"""Operations are retried for this long while the store is unreachable or failing."""
RANGE_BYTES = 8 << 20
"""Large objects are read in concurrent ranges of this size, so that each request can be retried by itself."""
SIDE_BY_SIDE = 8
"""Maximum concurrent reads: ranges of an object, or files of a history."""
REQUEST_SECONDS = 30.0
"""Timeout of a request."""
_PART_SECONDS = 4.0
"""With a lease, the client retries a part of a large object for this long."""
_TOLD_AFTER_SECONDS = 5.0

SCRATCH = "THERMOPILE_SCRATCH"
"""Environment variable: folder for this machine's working files; default `~/.cache/thermopile`, for bucket data."""
_MARKS = ".ranks"

_NO_BUCKET = re.compile("The specified (bucket|container) does not exist")
_log = logging.getLogger(__name__)
_telling, _told_at = Lock(), dict[tuple[str, str | bool | None], float]()
"""When an outage was last logged, by bucket and endpoint."""
_NEVER = Event()
T = TypeVar("T")


class Lease(Protocol):
    """The right to change objects below an address. Another process may take it from a writer that was cut off."""

    @property
    def term(self) -> str:
        """Number of this holding, 8 hexadecimal digits: part of the names of objects that only its holder writes."""

    def confirm(self, seconds: float) -> None:
        """Return if the lease lasts for `seconds`; renew it first if it may not. Called before every request.

        Raises the holder's own error once another process has the lease, and OSError while the store is unreachable.
        """


@dataclass(frozen=True)
class Address:
    """The place of an object, or of all objects below it; joined and printed like a path.

    Methods raise FileNotFoundError for a missing object or bucket, PermissionError, ObjectStoreError if the store
    fails for longer than `patience`, and the lease's errors. They are safe to call from several threads.
    """

    is_remote: ClassVar[bool] = True
    keeps_copies: ClassVar[bool] = True
    noun: ClassVar[str] = "address"
    occupied: ClassVar[str] = "has objects below it; choose another address"
    sharing: ClassVar[str] = "set the same AWS_ENDPOINT_URL, or account, on all machines"

    bucket: str
    key: str
    """Path in the bucket, without slashes at its ends; empty for the bucket itself."""
    lease: Lease | None = field(default=None, compare=False, repr=False)
    """Confirmed before each request, retries and listings included: a listing may decide what is deleted."""
    patience: float | None = field(default=None, compare=False, repr=False)
    """Seconds; None: PATIENCE_SECONDS."""
    scheme: str = "s3"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises AddressError unless the text is `s3://bucket` or `s3://bucket/path`, or one of gs or az."""
        scheme, _, rest = text.partition("://")
        if {"@", ":"} & {*rest.split("/")[0]}:  # do not repeat a secret, which may hold slashes: messages are logged
            raise bucket_errors.AddressError(
                f"a {scheme}:// address must not hold credentials or a port; set AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, or those of the cloud, in the environment"
            )
        found = re.fullmatch(r"(s3|gs|az)://([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(?:/(.*))?", text)
        key = (found[3] or "").strip("/") if found else ""
        if not found or (key and {"", ".", ".."} & {*key.split("/")}) or not key.isprintable():
            raise bucket_errors.AddressError(
                f"{text!r} is not an address in an object store: write s3://bucket/path, or gs:// or az://, with a "
                "bucket of 3 to 63 lower-case letters, digits, '.', '-' and '_', and a path without empty parts or '..'"
            )
        return cls(found[2], key, scheme=found[1])

    @property
    def root(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    def __truediv__(self, name: str) -> Address:
        return dataclasses.replace(self, key=f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Address:
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    def resolve(self) -> Address:
        """Return the address unchanged: it is absolute already."""
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
        return data, _tag(found)

    def read_described(self, max_bytes: int = MAX_TEXT_BYTES) -> tuple[bytes, ObjectMeta]:
        """Return an object's bytes and its metadata, such as `last_modified`. Raises as `read_bytes`."""

        def get() -> tuple[bytes, ObjectMeta]:
            found = obstore.get(_store(self.root), self.key)
            if (size := found.meta["size"]) > max_bytes:
                raise bucket_errors.ObjectTooLargeError(f"{self} has {size:,} bytes, above its limit, {max_bytes:,}")
            return bytes(found.bytes()), found.meta

        return self._repeated(get)

    def read_range(self, start: int, length: int, ended: Event = _NEVER, version: str = "") -> bytes:
        """Return `length` bytes from `start`, which must lie before the object's end; fewer at the end.

        ended: once set, store failures are raised without retry. version: raise FileExistsError if it differs.
        """

        def get_range() -> bytes:
            options: GetOptions = {"range": (start, start + length)}
            if version:
                options["if_match"] = version
            try:
                return bytes(obstore.get(_store(self.root), self.key, options=options).bytes())
            except PreconditionError:
                raise FileExistsError(f"{self} was replaced by another object") from None

        return self._repeated(get_range, ended)

    def size(self) -> int:
        return self.version()[0]

    def version(self) -> tuple[int, str]:
        """Return an object's size in bytes, and its version as in `read_version`."""
        found = self._described()
        return found["size"], _tag(found)

    def modified(self) -> float:
        """Return the time at which an object was written, in seconds since 1970 by the store's clock."""
        return self._described()["last_modified"].timestamp()

    def _described(self) -> ObjectMeta:
        return self._repeated(lambda: obstore.head(_store(self.root), self.key))

    def exists(self) -> bool:
        """Return whether an object has exactly this address."""
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    def download(self, file: BinaryIO) -> int:
        """Write the object to an empty file, in concurrent ranges; return its size."""
        size = self.size()

        def copy(start: int) -> None:
            data = self.read_range(start, min(RANGE_BYTES, size - start))
            while data:
                written = os.pwrite(file.fileno(), data, start)
                data, start = data[written:], start + written

        with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
            list(threads.map(copy, range(0, size, RANGE_BYTES)))
        return size

    def write(self, data: bytes | Path) -> str:
        """Write or replace an object, from bytes or a file; return its version.

        Readers see the old object or the new one, never a part: a store publishes an object once it is complete.
        """

        def put() -> str:
            size = len(data) if isinstance(data, bytes) else data.stat().st_size
            if size <= RANGE_BYTES:
                whole = data if isinstance(data, bytes) else data.read_bytes()
                return _tag(obstore.put(_store(self.root), self.key, whole, use_multipart=False))
            # Parts are retried one by one: otherwise a store that fails now and then would never take all of them.
            store = _store(self.root, PATIENCE_SECONDS if self.lease is None else _PART_SECONDS)
            return _tag(obstore.put(store, self.key, self._pieces(data)))

        return self._repeated(put)

    def _pieces(self, data: bytes | Path) -> Iterator[bytes]:
        """Yield data in upload parts, each once the lease allows sending and retrying it."""
        opened = BytesIO(data) if isinstance(data, bytes) else data.open("rb")
        with opened, ThreadPoolExecutor(1) as thread:
            while piece := opened.read(RANGE_BYTES):
                if self.lease is not None:  # in a thread, since obstore panics at a call within its own call
                    thread.submit(self.lease.confirm, _PART_SECONDS).result()
                yield piece

    def adopt(self, file: Path) -> str:
        """Write the object from a local file, which is then removed; return its version."""
        version = self.write(file)
        file.unlink()
        return version

    def rewrite(self, data: bytes) -> None:
        """Create a small object, or replace its current version.

        An earlier writer's pending request then no longer replaces it.
        """
        while True:
            with suppress(FileExistsError):  # an earlier writer's request came between the two
                try:
                    self.replace(data, self.version()[1])
                except FileNotFoundError:
                    self.create(data)
                return

    def create(self, data: bytes) -> str:
        """Create an object and return its version. Raises FileExistsError if the object exists."""
        return self._written_if("", data)

    def replace(self, data: bytes, version: str) -> str:
        """Replace this version of an object; return the new version. Raises FileExistsError if the version differs.

        version: from `read_version`, `create` or `replace`.
        """
        return self._written_if(version, data)

    def _written_if(self, version: str, data: bytes) -> str:
        attempts = 0

        def put() -> str:
            nonlocal attempts
            attempts += 1
            try:
                mode: Literal["create"] | UpdateVersion = {"e_tag": version} if version else "create"
                if version and self.scheme == "gs":  # Google compares generations, which no listing gives
                    found = obstore.head(_store(self.root), self.key)
                    if _tag(found) != version:
                        raise PreconditionError
                    mode = {"e_tag": version, "version": found["version"]}
                return _tag(obstore.put(_store(self.root), self.key, data, mode=mode, use_multipart=False))
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                there, its_version = self._as_it_is(len(data))
                # The earlier attempt may have succeeded although its answer was lost.
                if attempts > 1 and there == data:
                    return its_version
                if its_version == version:
                    raise  # the earlier attempt is still pending; repeat this one
                raise FileExistsError(f"{self} was written by another process") from None

        return self._repeated(put)

    def _as_it_is(self, length: int) -> tuple[bytes | None, str]:
        """Return bytes, None unless their number is `length`, and version, empty without an object."""
        try:
            size, version = self.version()
            return self.read_version(length) if size == length else (None, version)
        except FileNotFoundError:
            return None, ""

    def supersede(self, data: bytes, version: str | None) -> None:
        """Replace the version that was read; None: create the object, with a lease also over an earlier writer's.

        Raises FileExistsError if the version differs.
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
        """Delete an object; a missing object is no error."""
        self._repeated(partial(_delete, self.root, [self.key]))

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects below this address, a thousand in a request; missing ones are no error."""
        keys = [(self / name).key for name in names]
        for start in range(0, len(keys), 1000):
            self._repeated(partial(_delete, self.root, keys[start : start + 1000]))

    def is_missing(self) -> bool:
        return not self.exists()

    is_present = exists
    is_file = exists
    is_seen = exists

    def is_folder(self) -> bool:
        """Return True: an address may have any number of objects below it."""
        return True

    def holds(self, index: str) -> bool:
        """Return whether the folder below this address is complete: it has `index`, which is written last."""
        return (self / index).exists()

    is_taken = holds

    def names(self) -> list[str]:
        """Return the names of the objects directly below this address, in any order."""
        return [name for name, _, _ in self.listing() if "/" not in name]

    def irregular_names(self) -> Iterator[str]:
        """Yield nothing: an object is a regular file."""
        return iter(())

    def half_written(self) -> list[str]:
        """Return nothing: no object exists before it is complete."""
        return []

    def content(self) -> Iterator[str]:
        """Yield the first part of the names of the first hundred objects below this address."""
        return (name.partition("/")[0] for name, _, _ in islice(self.listing(), 100))

    def files(self) -> Iterator[str]:
        """Yield the relative paths of all objects below this address, but those that stand for folders."""
        return (name for name, _, _ in self.listing() if not name.endswith("/"))

    def size_below(self) -> int:
        return sum(size for _, size, _ in self.listing())

    def make(self) -> list[Path]:
        """Do nothing: objects need no folders."""
        return []

    def built(self) -> AbstractContextManager[Address]:
        """Yield this address: the folder counts as built once its last object, which `holds` checks, is written."""
        return nullcontext(self)

    def clear(self) -> None:
        self.remove([name for name, _, _ in self.listing()])

    def copied(self, source: LocalPath | Address) -> bool:
        """Let the store write a copy of an object; return False if it is elsewhere, or too large for one request."""
        if not isinstance(source, Address) or source.root != self.root:
            return False
        if source.size() > 1 << 30:  # S3 would copy up to 5 GB in a request, but for longer than a request may take
            return False
        self._repeated(lambda: obstore.copy(_store(self.root), source.key, self.key))
        return True

    def refuse_link(self) -> None:
        """Do nothing: no object is a link."""

    refuse_foreign_folder = refuse_foreign_file = refuse_link

    def written_through(self) -> AbstractContextManager[None]:
        """Do nothing: an object lasts once its request succeeds."""
        return nullcontext()

    def remove_leftovers(self) -> None:
        """Remove the marks that killed ranks left."""
        marks = self / _MARKS
        marks.remove([name for name, _, _ in marks.listing()])

    def mark(self, name: str) -> Address:
        """Return the place of an empty object that shows other machines that they share this place."""
        return self / f"{_MARKS}/{name}.partial"

    @property
    def scratch(self) -> LocalPath:
        """This machine's folder for working files of this address; it may not exist yet."""
        return scratch_of(str(self), self.name or self.bucket)

    def made_scratch(self) -> LocalPath:
        """Return `scratch` after making it. Raises NotRegularFileError if it is a link."""
        return made_folder(self.scratch)

    @contextmanager
    def on_this_machine(self, names: Iterable[str]) -> Iterator[LocalPath]:
        """Yield a folder of this name with copies of these objects; remove it afterwards."""
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
        """Return the default path for a report on this address: in the working directory."""
        return LocalPath(f"{name}-{self.name or self.bucket}")

    def listing(self) -> Iterator[tuple[str, int, str]]:
        """Yield the path below this address, bytes and version of every object below it, sorted by path.

        The listing is read in pages of a thousand.
        """
        prefix, after = f"{self.key}/" if self.key else "", None

        def page() -> Sequence[ObjectMeta]:
            return next(obstore.list(_store(self.root), prefix, offset=after, chunk_size=1000), [])

        while found := self._repeated(page):
            yield from ((each["path"][len(prefix) :], each["size"], _tag(each)) for each in found)
            after = found[-1]["path"]

    def _repeated(self, operation: Callable[[], T], ended: Event = _NEVER) -> T:
        """Return the operation's result; retry while the store is unreachable or failing, until `ended` is set."""
        started, pause = time.monotonic(), 0.1
        patience = PATIENCE_SECONDS if self.patience is None else self.patience
        while True:
            try:
                if self.lease is not None:
                    self.lease.confirm(0.0)
                return operation()
            except FileNotFoundError as error:
                raise self._missing(error) from None
            except (BaseError, bucket_errors.ObjectStoreError) as error:
                if _NO_BUCKET.search(str(error)):  # in answer to a listing
                    raise self._missing(error) from None
                waited = time.monotonic() - started
                if not bucket_errors.may_pass(error) or waited + pause > patience or ended.is_set():
                    raise bucket_errors.as_os_error(self, error) from error
                if waited > _TOLD_AFTER_SECONDS and self._is_first_to_tell():
                    _log.warning("%s; trying again for up to %.0f s", bucket_errors.as_os_error(self, error), patience)
            ended.wait(pause * (0.5 + random()))  # jitter: clients that failed together must not retry together
            pause = min(2 * pause, 10.0)

    def _is_first_to_tell(self) -> bool:
        """Return whether no concurrent operation has logged this outage."""
        store, now = (self.root, self.scheme == "s3" and endpoint_url()), time.monotonic()
        with _telling:
            before = _told_at.get(store)
            if before is not None and now - before < PATIENCE_SECONDS:
                return False
            _told_at[store] = now
        return True

    def _missing(self, error: Exception) -> FileNotFoundError:
        if _NO_BUCKET.search(str(error)):
            return bucket_errors.MissingBucketError(f"{self}: there is no bucket {self.bucket}")
        return FileNotFoundError(f"{self} does not exist")


def _tag(found: ObjectMeta | PutResult) -> str:
    """Return the version, which Azure's listings leave without quotes."""
    tag = found["e_tag"] or ""
    return f'"{tag}"' if tag.startswith("0x") else tag


def _delete(root: str, keys: Sequence[str]) -> None:
    try:
        obstore.delete(_store(root), keys)
    except FileNotFoundError:  # Google and Azure refuse a missing one, and may not have come to the others
        for key in keys if len(keys) > 1 else ():
            _delete(root, [key])


def is_address(text: str) -> bool:
    """Return whether the text looks like an address, not a path."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text) is not None


def scratch_of(place: str, name: str) -> LocalPath:
    """Return this machine's folder for working files of a place, whose own name is `name`."""
    return _scratch() / f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def made_folder(folder: LocalPath) -> LocalPath:
    """Return a folder of `scratch_of` after making it. Raises NotRegularFileError if it is a link."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    own_directory(folder)
    return folder


def _scratch() -> LocalPath:
    return LocalPath(os.environ.get(SCRATCH) or user_cache()).absolute()


@lru_cache(maxsize=64)
def _store(root: str, repeat_seconds: float = 0.0) -> ObjectStore:
    """repeat_seconds: how long the client retries a request; 0: `_repeated` does, for all failures alike."""
    client: ClientConfig = {"timeout": timedelta(seconds=REQUEST_SECONDS)}
    retry: RetryConfig = {
        "max_retries": 20 if repeat_seconds else 0, "retry_timeout": timedelta(seconds=repeat_seconds)
    }  # fmt: skip
    scheme, _, bucket = root.partition("://")
    if scheme != "s3":
        return from_url(f"{root}/", client_options=client, retry_config=retry)
    config: S3Config = {"region": region(), "virtual_hosted_style_request": has_own_host(bucket)}
    if endpoint := endpoint_url():
        config["endpoint"], client["allow_http"] = endpoint, endpoint.startswith("http://")
    keys = profile_credentials()
    return S3Store(bucket, config=config, client_options=client, retry_config=retry, credential_provider=keys)
