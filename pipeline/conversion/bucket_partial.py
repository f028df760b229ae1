"""A dataset built in its final place in an object store, since objects cannot be renamed.

    OUT/.partial/begin.lock               of the process that makes the plan, and reads a sample of tars for it
    OUT/.partial/plan.json                everything that determines the dataset's bytes, created by the first process
    OUT/shards/shard-00000.beton          a verified shard, with .rows and .parquet
    OUT/.partial/part-00000.errors.jsonl  the samples left out
    OUT/.partial/part-00000.done.json     its marker, written last: without it, the shard is written again
    OUT/tokenizer.json
    OUT/dataset.json                      created last; then .partial/ is removed

Nothing is locked: two processes with the same plan write the same bytes under the same name, except for the plan, the
tokenizer and dataset.json, which are created only if missing. A marker names its plan and the ETags of its objects: if
somebody starts over, the output of processes still running another plan does not count. Workers write to a local folder
in TMPDIR, which holds one shard per worker.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory, gettempdir
from typing import NamedTuple

from pydantic import ValidationError

from ...storage.bucket import Address
from ...storage.bucket_lock import BucketLock
from ...storage.files import read_regular, write_atomically
from ...storage.lock import FileLock, LockedError, TakenOverError
from ...storage.place import Place
from ..dataset_index import ERRORS_FILE, INDEX_FILE, SHARD_FOLDER, SHARD_SUFFIXES, TOKENIZER_FILE, shard_name
from ..errors import DatasetExistsError
from ..sources import BadSample, Facts
from ..tokenizer import MAX_FILE_BYTES
from .bad_samples import read_bad_samples
from .marker import PART_SUFFIXES, PartResult, PartSuffix, read_marker, stem
from .partial import begun_plan, waited_for
from .plan import Plan

_FOLDER, _CLAIM = ".partial", "begin.lock"
_OWN = re.compile(
    r"\.partial/(begin\.lock|plan\.json|errors\.jsonl|part-[0-9]{5,}\.(errors\.jsonl|done\.json))"
    r"|shards/shard-[0-9]{5,}(\.[0-9]+)?\.(beton|rows|parquet)|tokenizer\.json|errors\.jsonl"
)
"""Names of an unfinished conversion's objects."""
_SCRATCH = "thermopile-shards-"
AT_ONCE = 16
"""Maximum concurrent reads of small objects."""


class PartObjects(NamedTuple):
    """One part: a worker's local files for it, and its final objects."""

    scratch: Path
    out: Address
    number: int
    plan: int
    """Plan.made_at of the part's plan."""

    def being_written(self, suffix: PartSuffix, shard: int = 0) -> Path:
        return self.scratch / f"part-{stem(self.number, shard)}.{os.getpid()}.{suffix}"

    def name(self, suffix: PartSuffix, shard: int = 0) -> str:
        """Return an object's name below the dataset's address."""
        if suffix in SHARD_SUFFIXES:
            return f"{SHARD_FOLDER}/{shard_name(stem(self.number, shard), suffix)}"
        return f"{_FOLDER}/part-{self.number:05d}.{suffix}"

    def object(self, suffix: PartSuffix, shard: int = 0) -> Address:
        return self.out / self.name(suffix, shard)

    def begin(self, shard: int = 0) -> int:
        """Create the .beton to write, and return its descriptor."""
        for suffix in PART_SUFFIXES if shard == 0 else SHARD_SUFFIXES:
            self.being_written(suffix, shard).unlink(missing_ok=True)  # left by an earlier attempt of this process
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self.being_written("beton", shard), flags, 0o644)

    def publish(self, result: PartResult) -> None:
        """Upload the verified files, then the marker. Raises DatasetExistsError if the conversion has ended."""
        self._refuse_ended()
        shards = []
        for shard, found in enumerate(result.shards):
            etags: dict[str, str] = {suffix: self._uploaded(suffix, shard) for suffix in SHARD_SUFFIXES}
            shards.append(found._replace(etags=etags))
        result = result._replace(shards=tuple(shards), errors_etag=self._uploaded("errors.jsonl"))
        self.object("done.json").write(result.sealed())

    def _uploaded(self, suffix: PartSuffix, shard: int = 0) -> str:
        file = self.being_written(suffix, shard)
        etag = self.object(suffix, shard).write(file)
        file.unlink()
        return etag

    def _refuse_ended(self) -> None:
        with suppress(FileNotFoundError, ValidationError):
            if Plan.model_validate_json((self.out / _FOLDER / "plan.json").read_bytes()).made_at == self.plan:
                return
        raise DatasetExistsError(f"another process has finished the conversion to {self.out}, or started it over")


class BucketPartial:
    """The objects of an unfinished conversion to `out`. Methods raise as Address does."""

    def __init__(self, out: Address, scratch: Path) -> None:
        self.out, self.scratch = out, scratch
        self.path = out / _FOLDER
        self.tokenizer = scratch / TOKENIZER_FILE
        """The local copy."""
        self.errors = self.path / ERRORS_FILE
        self.begun: Place = out
        """Place to remove in order to start over."""
        self.disk = scratch

    @property
    def in_progress(self) -> bool:
        """Whether there is a conversion to resume."""
        return (self.path / "plan.json").exists() and not self.is_whole

    @property
    def is_whole(self) -> bool:
        return (self.out / INDEX_FILE).exists()

    @property
    def facts(self) -> Facts | None:
        """The facts of an unfinished conversion, if any."""
        return Plan.model_validate_json((self.path / "plan.json").read_bytes()).facts if self.in_progress else None

    def clear(self) -> None:
        """Delete an unfinished conversion's objects, the plan last. Raises DatasetExistsError if there are others."""
        for name in sorted(self._own_names(), key=lambda name: name == f"{_FOLDER}/plan.json"):
            (self.out / name).delete()

    def _own_names(self) -> list[str]:
        names = [name for name, _ in self.out.objects()]
        if others := [name for name in names if not _OWN.fullmatch(name)]:
            raise self._holds_others(others)
        return names

    def _holds_others(self, names: Sequence[str]) -> DatasetExistsError:
        return DatasetExistsError(f"{self.out} holds other objects, such as {names[0]!r}; choose another address")

    def begin(self, plan: Plan) -> Plan:
        """Begin a conversion, or join others, and return its plan. Raises DatasetExistsError if the plan differs."""
        file = self.path / "plan.json"
        with suppress(FileExistsError):  # another process may be first
            file.create(plan.model_dump_json(indent=1).encode())
        begun = begun_plan(plan, file.read_bytes(), self.begun)
        with suppress(FileNotFoundError):
            self._fetch_tokenizer()
        return begun

    def _fetch_tokenizer(self) -> None:
        write_atomically(self.tokenizer, (self.out / TOKENIZER_FILE).read_bytes(MAX_FILE_BYTES))

    def keep_tokenizer(self, text: bytes) -> None:
        """Write the tokenizer unless another process was first: then all use that process's tokenizer."""
        with suppress(FileExistsError):
            (self.out / TOKENIZER_FILE).create(text)
        self._fetch_tokenizer()

    @contextmanager
    def beginning(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Let one process at a time begin; the others wait, and `tell` says for whom."""
        # A process that loses the lock does no harm: plan and tokenizer are created only if missing.
        lost = partial(TakenOverError, f"another process has begun the conversion to {self.out}")
        with waited_for(lambda: BucketLock(self.path / _CLAIM, self.scratch, lost, quiet=True), tell):
            yield

    def remove_files_of_killed_writers(self) -> None:
        """Do nothing: no object exists before it is complete."""

    remove_leftovers = remove_files_of_killed_writers

    def remove_damaged(self, plan: Plan) -> None:
        """Do nothing: `results` compares the ETags, and the store guarantees the bytes."""

    def parts(self, plan: Plan) -> list[PartObjects]:
        return [PartObjects(self.scratch, self.out, part, plan.made_at) for part in range(plan.parts)]

    def results(self, plan: Plan) -> list[PartResult | None]:
        """Return the result of every part.

        None for a part to write again: it is not done, or an object differs from the one that its marker names.
        """
        there = {name: (size, etag) for name, size, etag in self.out.listing()}

        def result(part: PartObjects) -> PartResult | None:
            if part.name("done.json") not in there:
                return None
            if (found := read_marker(part.object("done.json").read_bytes(), part.plan)) is None:
                return None
            is_whole = there.get(part.name("errors.jsonl")) == (found.errors_bytes, found.errors_etag) and all(
                there.get(part.name(suffix, shard)) == (each.sizes[suffix], each.etags.get(suffix))
                for shard, each in enumerate(found.shards)
                for suffix in SHARD_SUFFIXES
            )
            return found if is_whole else None

        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(result, self.parts(plan)))

    def row_records(self, plan: Plan, results: Sequence[PartResult]) -> list[Place]:
        return [
            part.object("rows", shard)
            for part, result in zip(self.parts(plan), results, strict=True)
            for shard in range(len(result.shards))
        ]

    def bad_samples(self, plan: Plan) -> list[BadSample]:
        """Return the samples left out so far, in shard order; saves their list as an object."""
        self._gather_errors(plan, self.errors)
        return list(read_bad_samples(self.errors))

    def _gather_errors(self, plan: Plan, into: Address) -> None:
        there, parts = dict(self.path.objects()), self.parts(plan)

        def lines(part: PartObjects) -> bytes:
            whole = part.object("errors.jsonl")
            if whole.name in there:
                return whole.read_bytes(there[whole.name]) if there[whole.name] else b""
            in_progress = next(self.scratch.glob(f"part-{part.number:05d}.*.errors.jsonl"), None)
            return read_regular(in_progress) if in_progress else b""

        with NamedTemporaryFile(dir=self.scratch) as gathered, ThreadPoolExecutor(AT_ONCE) as threads:
            for first in range(0, len(parts), AT_ONCE):
                gathered.writelines(threads.map(lines, parts[first : first + AT_ONCE]))
            gathered.flush()
            into.write(Path(gathered.name))

    def assemble(self, plan: Plan, results: Sequence[PartResult], index: bytes) -> None:
        """Write errors.jsonl, and dataset.json last. Raises DatasetExistsError if another process wrote another one."""
        self._gather_errors(plan, self.out / ERRORS_FILE)
        try:
            (self.out / INDEX_FILE).create(index)
        except FileExistsError:
            if (self.out / INDEX_FILE).read_bytes() != index:
                raise DatasetExistsError(f"{self.out} was written by another conversion in between") from None

    def publish(self) -> None:
        """Do nothing: the dataset is in its final place."""

    def clean_up(self) -> None:
        """Remove the finished conversion's temporary objects, the plan last."""
        if self.is_whole:
            for name, _ in sorted(self.path.objects(), key=lambda found: found[0] == "plan.json"):
                (self.path / name).delete()

    def refuse_existing(self, *, overwrite: bool, resume: bool) -> None:
        """Raise DatasetExistsError if there is a dataset, or an unfinished conversion that must not be resumed."""
        if self.is_whole:
            what = "exists and was not converted with these settings" if resume else "exists"
            raise DatasetExistsError(
                f"{self.out} {what}; choose another address, or delete it: an object store cannot "
                "replace a dataset at once"
            )
        if self.in_progress and not (overwrite or resume):
            raise DatasetExistsError(
                f"{self.path} holds an unfinished conversion; continue it with --resume, or start over with --overwrite"
            )
        # Without a plan, the objects are no conversion's leftovers, but for the lock of a process that makes the plan;
        # only starting over removes them.
        names = [name for name in self._own_names() if name != f"{_FOLDER}/{_CLAIM}"]
        if names and not self.in_progress and (resume or not overwrite):
            raise self._holds_others(names)


@contextmanager
def in_bucket(out: Address) -> Iterator[BucketPartial]:
    """Yield the unfinished conversion to an address, with a local folder for shards in progress."""
    _remove_folders_of_killed()
    with TemporaryDirectory(prefix=_SCRATCH) as scratch:
        lock = FileLock(Path(scratch) / "lock")
        try:
            yield BucketPartial(out, Path(scratch))
        finally:
            lock.release()


def _remove_folders_of_killed() -> None:
    """Delete the local shards in progress of killed processes."""
    for folder in Path(gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(LockedError, OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and (folder / "lock").exists():
                lock = FileLock(folder / "lock")
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
