"""A dataset that is built until it is complete: below `.OUT.partial`, or in its final place in an object store.

    in a folder                      in a store
    .OUT.partial/lock                                                held by the only process converting to OUT, or
                                                                     shared by the processes of its parts
    .OUT.partial/begin.lock          OUT/.partial/begin.lock         held by the process that makes the plan
    .OUT.partial/plan.json           OUT/.partial/plan.json          everything that determines the dataset's bytes
    .OUT.partial/parts/part-N.*      OUT/.partial/part-N.*           errors.jsonl, the samples that part N left out, and
                                                                     done.json, its marker: written last
    .OUT.partial/errors.jsonl        OUT/.partial/errors.jsonl       the samples left out, if the conversion failed
    .OUT.partial/replaced/                                           was OUT, until it is removed
    .OUT.partial/writing-*/          TMPDIR/thermopile-shards-*/     a process's shards in progress, its lock beside it
    .OUT.partial/dataset/            OUT/                            the dataset: tokenizer.json at the start, verified
                                                                     shards, dataset.json last

Every step can be repeated, so a conversion killed at any moment resumes where it was. Nothing is written through links.
Several processes, on several machines, may write parts concurrently: two with the same plan write the same bytes under
the same name, except for the plan, the tokenizer and dataset.json, which are created only if missing. A marker names
its plan and its files, in a store by their ETags: if somebody starts over, the output of processes still running
another plan does not count.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

from pydantic import ValidationError

from ...storage.bucket_lock import BucketLock
from ...storage.files import own_directory, read_regular, sha256_of, sync, write_atomically, writer_name
from ...storage.local import LocalPath
from ...storage.lock import FileLock, LockedError, TakenOverError, own_folder
from ...storage.place import Place, made_for
from ..cores import cores
from ..dataset.index import (
    ERRORS_FILE,
    INDEX_FILE,
    SHARD_FOLDER,
    SHARD_SUFFIXES,
    TOKENIZER_FILE,
    read_index,
    shard_name,
)
from ..dataset.tokenizer import MAX_FILE_BYTES
from ..errors import DatasetError, DatasetExistsError
from ..sources import BadSample, Facts
from .marker import PartResult, PartSuffix, read_bad_samples, read_marker, stem
from .plan import Plan

SECONDS_BETWEEN_LOOKS = 0.5
AT_ONCE = 16
"""Maximum concurrent reads of small files."""
_OWN_OBJECTS = re.compile(
    r"\.partial/(begin\.lock|plan\.json|errors\.jsonl|part-[0-9]{5,}\.(errors\.jsonl|done\.json))"
    r"|shards/shard-[0-9]{5,}(\.[0-9]+)?\.(beton|rows|parquet)|tokenizer\.json|errors\.jsonl"
)
"""Names of an unfinished conversion's objects."""
_DATASET, _PARTS, _PLAN = ("dataset/", ""), ("parts/", ".partial/"), ("plan.json", ".partial/plan.json")
"""Names below `begun`, where the dataset is built apart, and in its final place; of folders, with a slash."""


class PartFiles(NamedTuple):
    """The files of one part: those of its shards, mostly one, and the list of the samples left out."""

    scratch: Path
    """Folder of files in progress."""
    top: Place
    is_in_place: bool
    number: int
    plan: int
    """Plan.made_at of the part's plan."""

    def being_written(self, suffix: PartSuffix, shard: int = 0) -> Path:
        """Return a name private to this process: a worker may briefly outlive its killed parent and must do no harm."""
        return self.scratch / f"part-{stem(self.number, shard)}.{writer_name()}.{suffix}"

    def name(self, suffix: PartSuffix, shard: int = 0) -> str:
        """Return the name of a complete file below `top`."""
        if suffix in SHARD_SUFFIXES:
            return f"{_DATASET[self.is_in_place]}{SHARD_FOLDER}/{shard_name(stem(self.number, shard), suffix)}"
        return f"{_PARTS[self.is_in_place]}part-{self.number:05d}.{suffix}"

    def names(self, result: PartResult) -> dict[str, tuple[int, str]]:
        """Return size and ETag of the files that a marker names."""
        files = {self.name("errors.jsonl"): (result.errors_bytes, result.errors_etag)}
        for shard, found in enumerate(result.shards):
            files |= {self.name(suffix, shard): (found.sizes[suffix], found.etags[suffix]) for suffix in SHARD_SUFFIXES}
        return files

    def publish(self, result: PartResult) -> None:
        """Give the verified files, which are on disk, their final names, and write the marker.

        Raises DatasetExistsError if the conversion has ended meanwhile.
        """
        made_at = None
        with suppress(FileNotFoundError, ValidationError):
            made_at = Plan.model_validate_json((self.top / _PLAN[self.is_in_place]).read_bytes()).made_at
        if made_at != self.plan:
            raise DatasetExistsError(f"another process has finished the conversion in {self.top}, or started it over")
        shards = []
        for shard, found in enumerate(result.shards):
            etags: dict[str, str] = {suffix: self._published(suffix, shard) for suffix in SHARD_SUFFIXES}
            shards.append(found._replace(etags=etags))
        result = result._replace(shards=tuple(shards), errors_etag=self._published("errors.jsonl"))
        (self.top / self.name("done.json")).rewrite(result.sealed())

    def _published(self, suffix: PartSuffix, shard: int = 0) -> str:
        return (self.top / self.name(suffix, shard)).adopt(self.being_written(suffix, shard))


class Partial:
    """The unfinished conversion to `out`. Methods raise OSError, and as Address does.

    scratch: this process's folder for files in progress; not needed to inspect alone.
    """

    def __init__(self, out: Place, scratch: Path = Path()) -> None:
        self.out, self.scratch = out, scratch
        self._is_in_place = out.is_remote  # objects cannot be renamed
        self.begun: Place = out if self._is_in_place else out.with_name(f".{out.name}.partial")
        """Place to remove in order to start over."""
        self.path = self.begun / ".partial" if self._is_in_place else self.begun
        self.dataset = out if self._is_in_place else self.begun / "dataset"
        self.errors, self._plan = self.path / ERRORS_FILE, self.begun / _PLAN[self._is_in_place]

    @property
    def disk(self) -> Path:
        """A folder on the disk of the files in progress."""
        return Path(gettempdir() if self._is_in_place else str(self.out.parent.resolve()))

    @property
    def tokenizer(self) -> Path:
        """This process's copy of the tokenizer; missing if there is none."""
        return self.scratch / TOKENIZER_FILE

    @property
    def in_progress(self) -> bool:
        """Whether there is a conversion to resume: before, there is no plan; afterwards the dataset is in its place."""
        return self._plan.is_file() and (not self.is_whole if self._is_in_place else self.dataset.exists())

    @property
    def is_whole(self) -> bool:
        """Whether the dataset is complete, but perhaps not in its place."""
        return (self.dataset / INDEX_FILE).is_file()

    @property
    def keeps_shards(self) -> bool:
        """Whether starting over would lose a shard."""
        is_done = any(name.endswith("done.json") for name, _, _ in self.begun.listing())
        return self.in_progress and (is_done or self.is_whole)

    @property
    def keeps_work(self) -> bool:
        """Whether there is work to resume: a shard, or in a store, where nothing is locked, one in progress."""
        return self.in_progress if self._is_in_place else self.keeps_shards

    @property
    def facts(self) -> Facts | None:
        """The facts of an unfinished conversion, if any."""
        return Plan.model_validate_json(self._plan.read_bytes()).facts if self.in_progress else None

    def parts(self, plan: Plan) -> list[PartFiles]:
        place = self.scratch.absolute(), self.begun.absolute(), self._is_in_place  # as a worker elsewhere can use them
        return [PartFiles(*place, part, plan.made_at) for part in range(plan.parts)]

    def clear(self) -> None:
        """Remove an earlier conversion's files, the plan last: without it, nothing else is left. The lock stays.

        Raises DatasetExistsError if there are other objects.
        """
        if self._is_in_place:
            self._remove(self._own_names())
            return
        assert isinstance(self.begun, LocalPath)
        for path in sorted(self.begun.iterdir(), key=lambda path: path == self._plan):
            if path.name == "lock" or path.with_suffix("") == self.scratch:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _remove(self, names: Sequence[str]) -> None:
        """Delete objects below `begun`, the plan last."""
        for last in (False, True):
            self.begun.remove(name for name in names if name.endswith("/plan.json") == last)

    def _own_names(self) -> list[str]:
        names = [name for name, _, _ in self.begun.listing()]
        if others := [name for name in names if not _OWN_OBJECTS.fullmatch(name)]:
            raise self._holds_others(others)
        return names

    def _holds_others(self, names: Sequence[str]) -> DatasetExistsError:
        return DatasetExistsError(f"{self.out} holds other objects, such as {names[0]!r}; choose another address")

    def begin(self, plan: Plan) -> Plan:
        """Begin a conversion by this plan, or join a running conversion, and return its plan; it can then be resumed.

        Raises DatasetExistsError if the conversion was begun with another plan, or the complete dataset here has
        another format than this version writes; NotRegularFileError if a file or folder here is a link.
        """
        for folder in (
            self.begun / _PARTS[self._is_in_place].removesuffix("/"),
            self.dataset,
            self.dataset / SHARD_FOLDER,
        ):
            folder.refuse_foreign_folder()
            folder.make()
        for file in (self._plan, self.dataset / TOKENIZER_FILE):
            file.refuse_link()
        with suppress(FileExistsError):  # another process may be first
            self._plan.create(plan.model_dump_json(indent=1).encode())
        cure = f"Use the same settings and files, or remove {self.begun} to start over"
        try:
            begun = Plan.model_validate_json(self._plan.read_bytes())
        except ValidationError as error:
            message = f"the plan.json in {self.begun} is damaged, or of another version. {cure}"
            raise DatasetExistsError(message) from error
        if differences := plan.differences(begun):
            found = "; ".join(differences)
            raise DatasetExistsError(f"{self.begun} was started with other settings or files: {found}. {cure}")
        if self.is_whole:
            try:
                read_index(self.dataset)
            except DatasetError as error:
                raise DatasetExistsError(f"remove {self.path} to start over: {error}") from error
        with suppress(FileNotFoundError):
            self._fetch_tokenizer()
        return begun

    @contextmanager
    def beginning(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Let one process at a time begin; the others wait, and `tell` says for whom."""
        # A process that loses the lock does no harm: plan and tokenizer are created only if missing.
        lost = partial(TakenOverError, f"another process has begun the conversion to {self.out}")
        told = False
        while True:
            try:
                lock = made_for(
                    self.path / "begin.lock", FileLock, lambda file: BucketLock(file, self.scratch, lost, quiet=True)
                )
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

    def keep_tokenizer(self, text: bytes) -> None:
        """Write the tokenizer unless another process was first: then all use that process's tokenizer."""
        with suppress(FileExistsError):
            (self.dataset / TOKENIZER_FILE).create(text)
        self._fetch_tokenizer()

    def _fetch_tokenizer(self) -> None:
        write_atomically(self.tokenizer, (self.dataset / TOKENIZER_FILE).read_bytes(MAX_FILE_BYTES))

    def results(self, plan: Plan) -> list[PartResult | None]:
        """Return the result of every part.

        None for a part to write again: it is not done, or a file is missing, a link, or another than its marker names.
        """
        there = {name: (size, tag) for name, size, tag in self.begun.listing()}

        def result(part: PartFiles) -> PartResult | None:
            if part.name("done.json") not in there:
                return None
            found = read_marker((self.begun / part.name("done.json")).read_bytes(), part.plan)
            is_whole = found and all(there.get(name) == file for name, file in part.names(found).items())
            return found if is_whole else None

        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(result, self.parts(plan)))

    def row_records(self, plan: Plan, results: Sequence[PartResult]) -> list[Place]:
        return [
            self.begun / part.name("rows", shard)
            for part, result in zip(self.parts(plan), results, strict=True)
            for shard in range(len(result.shards))
        ]

    def remove_damaged(self, plan: Plan) -> None:
        """Read all finished shards of a folder back and remove files whose bytes have changed: these are then not done.

        A store guarantees the bytes of an object.
        """

        def remove_if_damaged(found: tuple[PartFiles, PartResult | None]) -> None:
            part, result = found
            for shard, of_shard in enumerate(result.shards if result else ()):
                for suffix in SHARD_SUFFIXES:
                    file = Path(str(self.begun / part.name(suffix, shard)))
                    if sha256_of(file) != of_shard.digests[suffix]:
                        file.unlink()

        if not self.begun.keeps_copies:
            with ThreadPoolExecutor(cores()) as threads:
                [*threads.map(remove_if_damaged, zip(self.parts(plan), self.results(plan), strict=True))]

    def bad_samples(self, plan: Plan) -> list[BadSample]:
        """Return the samples left out so far, in shard order; saves their list in a file."""
        self._gather_errors(plan, self.errors)
        return list(read_bad_samples(self.errors))

    def _gather_errors(self, plan: Plan, into: Place) -> None:
        there, parts = {name: size for name, size, _ in self.begun.listing()}, self.parts(plan)

        def lines(part: PartFiles) -> bytes:
            if (name := part.name("errors.jsonl")) in there:
                return (self.begun / name).read_bytes(there[name]) if there[name] else b""
            in_progress = next(self.scratch.glob(f"part-{part.number:05d}.*.errors.jsonl"), None)
            return read_regular(in_progress) if in_progress else b""

        with (self.scratch / "gathered").open("wb") as gathered, ThreadPoolExecutor(AT_ONCE) as threads:
            for first in range(0, len(parts), AT_ONCE):
                gathered.writelines(threads.map(lines, parts[first : first + AT_ONCE]))
            gathered.flush()
            os.fsync(gathered.fileno())
        into.adopt(self.scratch / "gathered")

    def assemble(self, plan: Plan, results: Sequence[PartResult], index: bytes) -> None:
        """Write errors.jsonl, and dataset.json last. Raises DatasetExistsError if another process wrote another one."""
        self._gather_errors(plan, self.dataset / ERRORS_FILE)
        parts = zip(self.parts(plan), results, strict=True)
        named, shards = {name for part, result in parts for name in part.names(result)}, self.dataset / SHARD_FOLDER
        prefix = f"{_DATASET[self._is_in_place]}{SHARD_FOLDER}/"
        shards.remove(name for name, _, _ in shards.listing() if prefix + name not in named)  # of an earlier attempt
        try:
            (self.dataset / INDEX_FILE).create(index)
        except FileExistsError:
            if (self.dataset / INDEX_FILE).read_bytes() != index:
                raise DatasetExistsError(f"{self.out} was written by another conversion in between") from None

    def refuse_existing(self, *, overwrite: bool = False, resume: bool = False) -> None:
        """Raise DatasetExistsError if `out` or an unfinished conversion to it exists.

        With overwrite, only if `out` is not a dataset, or cannot be replaced; with resume, an unfinished conversion is
        allowed. One without a finished shard is started over.
        """
        out, what = self.out, "exists and was not converted with these settings" if resume else "exists"
        if self._is_in_place and self.is_whole:
            raise DatasetExistsError(
                f"{out} {what}; choose another address, or delete it: an object store cannot replace a dataset at once"
            )
        if not (overwrite or resume) and self.keeps_work:
            cure = "continue it with --resume, or start over with --overwrite"
            raise DatasetExistsError(f"{self.path} holds an unfinished conversion; {cure}")
        if self._is_in_place:
            # Without a plan, the objects are no conversion's leftovers, except the lock of a process that makes the
            # plan; only starting over removes them.
            names = [name for name in self._own_names() if name != ".partial/begin.lock"]
            if names and not self.in_progress and (resume or not overwrite):
                raise self._holds_others(names)
        elif out.exists():
            if not overwrite:
                raise DatasetExistsError(f"{out} {what}; choose another directory, or replace it with --overwrite")
            if out.is_taken(INDEX_FILE):
                try:
                    read_index(out)
                except DatasetError as error:
                    message = f"{out} was not replaced, --overwrite replaces only datasets: {error}"
                    raise DatasetExistsError(message) from error

    def publish(self) -> None:
        """Put the complete dataset into its place, unless it is there; an existing one is moved aside."""
        for folder in (self.dataset, self.dataset / SHARD_FOLDER):
            folder.remove(folder.half_written())
        if not self._is_in_place:
            assert isinstance(self.out, LocalPath)
            assert isinstance(self.dataset, LocalPath)
            if self.out.exists():
                self._remove_replaced()
                self.out.rename(str(self.path / "replaced"))
            self.dataset.rename(self.out)
            sync(self.out)
            sync(self.out.parent)

    def clean_up(self) -> None:
        """Remove what else a finished conversion left; only call this after the dataset is in its place."""
        if self._is_in_place:
            self._remove([f".partial/{name}" for name, _, _ in self.path.listing()])
        else:
            self._remove_replaced()

    def _remove_replaced(self) -> None:
        shutil.rmtree(str(self.path / "replaced"), ignore_errors=True)


@contextmanager
def claimed(out: Place, *, shared: bool = False) -> Iterator[Partial]:
    """Yield the unfinished conversion to `out`, with a folder for files in progress, to a process that may write it.

    In a folder, it is locked, and removed at the end unless it can be resumed. shared: together with other processes
    that convert parts; only the last of them may remove it. In a store, nothing is locked. Raises DatasetExistsError if
    another process is converting to `out`.
    """
    lock, folder, prefix = made_for(
        out,
        lambda path: (_locked(path, shared), Path(str(Partial(path).path)), "writing-"),
        lambda _: (nullcontext(), Path(gettempdir()), "thermopile-shards-"),
    )
    with lock, own_folder(folder, prefix) as scratch:
        yield Partial(out, scratch)


@contextmanager
def _locked(out: LocalPath, shared: bool) -> Iterator[None]:
    partial = Partial(out)
    lock = _lock(partial.path, out, shared)
    try:
        yield
    finally:
        if not partial.in_progress and (not shared or lock.is_last()):
            with suppress(OSError):
                partial.clear()
                shutil.rmtree(str(partial.path))  # with the lock, by which others know whose it is
        lock.release()


def _lock(path: Place, out: LocalPath, shared: bool) -> FileLock:
    assert isinstance(path, LocalPath)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        own_directory(path)
        if (found := [*path.content()]) and "lock" not in found:
            raise DatasetExistsError(f"{path} was not left by a conversion; rename it, and repeat")
        try:
            return FileLock(path / "lock", shared=shared)
        except FileNotFoundError:
            continue  # another conversion ended meanwhile and removed the directory
        except LockedError as error:
            cure = "wait for it, or choose another directory"
            raise DatasetExistsError(f"{out} is being written by {error.holder}; {cure}") from None
