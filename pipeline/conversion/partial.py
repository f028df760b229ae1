"""`.OUT.partial`, in which the dataset OUT is built until it is complete.

    lock                         held by the only process converting to OUT, or shared by the processes of its parts
    begin.lock                   held by the process that makes the plan, and reads a sample of tars for it
    plan.json                    everything that determines the dataset's bytes
    parts/part-00000.beton       a verified shard, with tables .rows and .parquet; .errors.jsonl lists samples left out
    parts/part-00000.1.beton     a second shard of the same part
    parts/part-00000.done.json   its marker, written last: without it, the shard is written again
    replaced/                    was OUT, until it is removed
    dataset/                     becomes OUT: tokenizer.json at the start, the rest once every shard is done
    errors.jsonl                 the samples left out, if the conversion failed because of them

Every step can be repeated, so a conversion killed at any moment resumes where it was. Nothing is written through links.
Several processes, on several machines, may write parts concurrently. A file in progress has its writer's name, and its
writer keeps the .beton locked.
"""

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from ...storage.bucket_lock import BucketLock
from ...storage.files import (
    is_still,
    open_own,
    own_directory,
    read_regular,
    remove_leftovers,
    sha256_of,
    sync,
    write_atomically,
    writer_name,
    written_aside,
)
from ...storage.local import LocalPath
from ...storage.lock import FileLock, LockedError
from ...storage.place import Place
from ..cores import cores
from ..dataset_index import (
    ERRORS_FILE,
    INDEX_FILE,
    SHARD_FOLDER,
    SHARD_SUFFIXES,
    TOKENIZER_FILE,
    ShardSuffix,
    read_index,
    shard_name,
)
from ..errors import DatasetError, DatasetExistsError
from ..sources import BadSample, Facts
from .bad_samples import read_bad_samples
from .marker import PART_SUFFIXES, PartResult, PartSuffix, read_marker, stem
from .plan import Plan

SECONDS_BETWEEN_LOOKS = 0.5


class PartFiles(NamedTuple):
    """The files of one part: those of its shards, mostly one, and the list of the samples left out."""

    folder: LocalPath
    number: int
    plan: int
    """Plan.made_at of the part's plan."""

    def file(self, suffix: PartSuffix, shard: int = 0) -> LocalPath:
        return self.folder / f"part-{stem(self.number, shard)}.{suffix}"

    def being_written(self, suffix: PartSuffix, shard: int = 0) -> Path:
        """Return a name private to this process: a worker may briefly outlive its killed parent and must do no harm."""
        return self.folder / f"{self.file(suffix, shard).name}.{writer_name()}.writing"

    def begin(self, shard: int = 0) -> int:
        """Create the .beton to write and return its descriptor, locked to show others that its writer lives."""
        for suffix in PART_SUFFIXES if shard == 0 else SHARD_SUFFIXES:
            self.being_written(suffix, shard).unlink(missing_ok=True)  # left by an earlier attempt of this process
        beton, flags = self.being_written("beton", shard), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            descriptor = os.open(beton, flags, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_still(beton, descriptor):
                return descriptor
            os.close(descriptor)  # not locked yet, it looked like a killed writer's file and was removed

    def publish(self, result: PartResult) -> None:
        """Rename the verified files, which are on disk, to their final names, and write the marker."""
        for shard in range(len(result.shards)):
            for suffix in SHARD_SUFFIXES:
                self.being_written(suffix, shard).rename(self.file(suffix, shard))
        self.being_written("errors.jsonl").rename(self.file("errors.jsonl"))
        sync(self.folder)
        write_atomically(self.file("done.json"), result.sealed())

    def marker(self) -> PartResult | None:
        """Return the content of the marker; None without a sound marker of this plan and version."""
        marker = self.file("done.json")
        if marker.is_symlink():
            return None
        try:
            return read_marker(read_regular(marker), self.plan)
        except FileNotFoundError:
            return None

    def bad_samples(self) -> LocalPath | None:
        """Return the list of the samples left out, complete or in progress; None if it does not exist yet."""
        whole = self.file("errors.jsonl")
        return whole if whole.exists() else next(self.folder.glob(f"{whole.name}.*.writing"), None)


class Partial:
    """The directory where `out` is built."""

    def __init__(self, out: LocalPath) -> None:
        self.out = out
        self.path = out.with_name(f".{out.name}.partial")
        self.dataset = self.path / "dataset"
        self.tokenizer = self.dataset / TOKENIZER_FILE
        self.errors = self.path / ERRORS_FILE
        self._plan, self._parts = self.path / "plan.json", self.path / "parts"
        self._replaced = self.path / "replaced"
        self.begun: Place = self.path
        """Path to remove in order to start over."""

    @property
    def disk(self) -> Path:
        """A folder on the same disk."""
        return self.out.parent.resolve()

    @property
    def in_progress(self) -> bool:
        """Whether there is a conversion to resume: before, there is no plan; afterwards dataset/ is gone."""
        return self._plan.is_file() and self.dataset.is_dir()

    @property
    def is_whole(self) -> bool:
        """Whether only the final rename is left."""
        return (self.dataset / INDEX_FILE).is_file()

    @property
    def facts(self) -> Facts | None:
        """The facts of an unfinished conversion, if any."""
        return Plan.model_validate_json(self._plan.read_bytes()).facts if self.in_progress else None

    def parts(self, plan: Plan) -> list[PartFiles]:
        return [PartFiles(self._parts, part, plan.made_at) for part in range(plan.parts)]

    def clear(self) -> None:
        """Remove an earlier conversion's files, the plan last: without it, nothing else is left. The lock stays."""
        for path in sorted(self.path.iterdir(), key=lambda path: path == self._plan):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def begin(self, plan: Plan) -> Plan:
        """Begin a conversion by this plan, or join a running conversion, and return its plan; it can then be resumed.

        Raises DatasetExistsError if the conversion was begun with another plan, or the complete dataset here has
        another format than this version writes; NotRegularFileError or DatasetError if a file or folder here is a link.
        """
        for directory in (self._parts, self.dataset, self.dataset / SHARD_FOLDER):
            own_directory(directory)
        sync(self.dataset)
        for file in (self._plan, self.tokenizer):
            _refuse_link(file)
        with suppress(FileExistsError):  # another process may be first
            write_atomically(self._plan, plan.model_dump_json(indent=1).encode(), replace=False)
        begun = begun_plan(plan, self._plan.read_bytes(), self.begun)
        if self.is_whole:
            self._refuse_other_format()
        return begun

    def remove_files_of_killed_writers(self) -> None:
        """Delete half-written shards whose writers are gone; live writers hold a lock."""
        for beton in self._parts.glob("*.beton.*.writing"):
            with suppress(FileNotFoundError, BlockingIOError):
                descriptor = open_own(beton, os.O_RDWR)  # NFS grants an exclusive lock only on a file open for writing
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if is_still(beton, descriptor):
                        self._remove_half_written(beton)
                finally:
                    os.close(descriptor)

    def _remove_half_written(self, beton: Path) -> None:
        part, _, writer = beton.name.partition(".beton.")
        for suffix in PART_SUFFIXES:
            (self._parts / f"{part}.{suffix}.{writer}").unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Remove all half-written files of killed processes. Only while this process holds the lock alone."""
        for directory in (self._parts, self.dataset, self.dataset / SHARD_FOLDER):
            remove_leftovers(directory)
        for file in self._parts.glob("*.writing"):
            file.unlink()

    def _refuse_other_format(self) -> None:
        try:
            read_index(self.dataset)
        except DatasetError as error:
            raise DatasetExistsError(f"{error}. To start over, remove {self.path}") from error

    @contextmanager
    def beginning(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Let one process at a time begin; the others wait, and `tell` says for whom."""
        with waited_for(lambda: FileLock(self.path / "begin.lock"), tell):
            yield

    def keep_tokenizer(self, text: bytes) -> None:
        """Write the tokenizer unless another process was first: then all use that process's tokenizer."""
        with suppress(FileExistsError):
            write_atomically(self.tokenizer, text, replace=False)

    def results(self, plan: Plan) -> list[PartResult | None]:
        """Return the result of every part.

        None for a part to write again: it is not done, or a file is missing, a link, or of another size.
        """
        return [self._result(part) for part in self.parts(plan)]

    def _result(self, part: PartFiles) -> PartResult | None:
        if (result := part.marker()) is None or _size(part.file("errors.jsonl")) != result.errors_bytes:
            return None
        is_whole = all(
            _size(self._file(part, shard, suffix)) == found.sizes[suffix]
            for shard, found in enumerate(result.shards)
            for suffix in SHARD_SUFFIXES
        )
        return result if is_whole else None

    def _file(self, part: PartFiles, shard: int, suffix: ShardSuffix) -> LocalPath:
        """Return a shard's file, which `assemble` may have moved."""
        file = part.file(suffix, shard)
        return file if file.exists() else self.dataset / SHARD_FOLDER / shard_name(stem(part.number, shard), suffix)

    def row_records(self, plan: Plan, results: Sequence[PartResult]) -> list[Place]:
        return [
            self._file(part, shard, "rows")
            for part, result in zip(self.parts(plan), results, strict=True)
            for shard in range(len(result.shards))
        ]

    def remove_damaged(self, plan: Plan) -> None:
        """Read all finished shards back and remove files whose bytes have changed: these shards are then not done."""

        def remove_if_damaged(part: PartFiles) -> None:
            result = self._result(part)
            for shard, found in enumerate(result.shards if result else ()):
                for suffix in SHARD_SUFFIXES:
                    if sha256_of(file := self._file(part, shard, suffix)) != found.digests[suffix]:
                        file.unlink()

        with ThreadPoolExecutor(cores()) as threads:
            for _ in threads.map(remove_if_damaged, self.parts(plan)):
                pass

    def bad_samples(self, plan: Plan) -> list[BadSample]:
        """Return the samples left out so far, in shard order; saves their list in a file."""
        self._gather_errors(plan, self.errors)
        return list(read_bad_samples(self.errors))

    def _gather_errors(self, plan: Plan, into: Path) -> None:
        with written_aside(into) as file:
            for part in self.parts(plan):
                if (lines := part.bad_samples()) is not None:
                    _refuse_link(lines)
                    with lines.opened() as of_part:
                        shutil.copyfileobj(of_part, file)

    def assemble(self, plan: Plan, results: Sequence[PartResult], index: bytes) -> None:
        """Move the shards to their places, and write dataset.json last."""
        for part, result in zip(self.parts(plan), results, strict=True):
            for shard in range(len(result.shards)):
                for suffix in SHARD_SUFFIXES:
                    to = self.dataset / SHARD_FOLDER / shard_name(stem(part.number, shard), suffix)
                    _move(part.file(suffix, shard), to)
        sync(self.dataset / SHARD_FOLDER)
        self._gather_errors(plan, self.dataset / ERRORS_FILE)
        write_atomically(self.dataset / INDEX_FILE, index)

    def refuse_existing(self, *, overwrite: bool = False, resume: bool = False) -> None:
        """Raise DatasetExistsError if `out` or an unfinished conversion to it exists.

        With overwrite, only if `out` is not a dataset; with resume, an unfinished conversion is allowed.
        """
        out = self.out
        if self.in_progress and not (overwrite or resume):
            raise DatasetExistsError(
                f"{self.path} holds an unfinished conversion; continue it with --resume, or start over with --overwrite"
            )
        if out.exists() and not overwrite:
            what = "exists and was not converted with these settings" if resume else "exists"
            raise DatasetExistsError(f"{out} {what}; choose another directory, or replace it with --overwrite")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            try:
                read_index(out)
            except DatasetError as error:
                message = f"{out} was not replaced, --overwrite replaces only datasets: {error}"
                raise DatasetExistsError(message) from error

    def publish(self) -> None:
        """Rename the complete dataset to `out`; an existing one is moved aside."""
        if self.out.exists():
            self.clean_up()
            self.out.rename(self._replaced)
        self.dataset.rename(self.out)
        sync(self.out)
        sync(self.out.parent)

    def clean_up(self) -> None:
        """Remove the dataset that was moved aside; only call this after the new one is in place."""
        shutil.rmtree(self._replaced, ignore_errors=True)


def begun_plan(plan: Plan, text: bytes, where: Place) -> Plan:
    """Parse a begun conversion's plan. Raises DatasetExistsError if it is damaged or differs from `plan`."""
    cure = f"Use the same settings and files, or remove {where} to start over"
    try:
        begun = Plan.model_validate_json(text)
    except ValidationError as error:
        raise DatasetExistsError(f"the plan.json in {where} is damaged, or of another version. {cure}") from error
    if differences := plan.differences(begun):
        raise DatasetExistsError(f"{where} was started with other settings or files: {'; '.join(differences)}. {cure}")
    return begun


@contextmanager
def claimed(out: LocalPath, *, shared: bool = False) -> Iterator[Partial]:
    """Lock the partial directory of `out` for this process; remove it at the end unless it can be resumed.

    shared: together with other processes that convert parts; only the last of them may remove it.
    Raises DatasetExistsError if another process is converting to `out`.
    """
    partial = Partial(out)
    lock = _lock(partial, shared)
    try:
        yield partial
    finally:
        if not partial.in_progress and (not shared or lock.is_last()):
            with suppress(OSError):
                partial.clear()
                shutil.rmtree(partial.path)  # with the lock, by which others know whose it is
        lock.release()


@contextmanager
def waited_for(take: Callable[[], FileLock | BucketLock], tell: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock that `take` takes, once its holder has released it."""
    told = False
    while True:
        try:
            lock = take()
            break
        except LockedError as error:
            if not told:
                tell(f"waiting for {error.holder}, which begins the conversion …")
            told = True
            time.sleep(SECONDS_BETWEEN_LOOKS)
    try:
        yield
    finally:
        lock.release()


def _lock(partial: Partial, shared: bool) -> FileLock:
    while True:
        partial.path.parent.mkdir(parents=True, exist_ok=True)
        own_directory(partial.path)
        if (found := [*partial.path.content()]) and "lock" not in found:
            raise DatasetExistsError(f"{partial.path} was not left by a conversion; rename it, and repeat")
        try:
            return FileLock(partial.path / "lock", shared=shared)
        except FileNotFoundError:
            continue  # another conversion ended meanwhile and removed the directory
        except LockedError as error:
            raise DatasetExistsError(
                f"{partial.out} is being written by {error.holder}; wait for it, or choose another directory"
            ) from None


def _move(file: Path, to: Path) -> None:
    _refuse_link(file)
    if file.exists():
        file.rename(to)
    elif not to.exists():
        raise DatasetError(f"{file} is missing, but its shard was finished; repeat the command")


def _refuse_link(file: Path) -> None:
    if file.is_symlink():
        raise DatasetError(f"{file} is a link, not a file written by a conversion; remove it and repeat the command")


def _size(file: Path) -> int | None:
    """Return a file's size in bytes; None if it is missing or a link."""
    try:
        found = file.lstat()
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
