"""A dataset that is built in an object store, where it stays: an object cannot be renamed.

    OUT/.partial/plan.json                everything that determines the dataset's bytes, created by the first process
    OUT/shards/shard-00000.beton          a verified shard, with .rows and .parquet
    OUT/.partial/part-00000.errors.jsonl  the samples left out
    OUT/.partial/part-00000.done.json     its marker, written last: without it, the shard is written again
    OUT/tokenizer.json
    OUT/dataset.json                      written last, unless there is one; then .partial/ is removed

Nothing is locked: whatever two processes write under one name is the same, except the plan and dataset.json, which are
created only where they are missing. Workers write in a local folder, TMPDIR's, which holds one shard for each.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ...files import read_regular, write_atomically
from ...objects import Address
from ...sealed_json import seal_line
from ..dataset_index import ERRORS_FILE, INDEX_FILE, SHARD_FOLDER, SHARD_SUFFIXES, TOKENIZER_FILE, shard_name
from ..errors import DatasetError, DatasetExistsError
from ..tokenizer import MAX_FILE_BYTES
from .partial import (
    PART_SUFFIXES,
    BadSample,
    PartSuffix,
    ShardResult,
    read_bad_samples,
    read_marker,
    refuse_other_plan,
)
from .plan import Plan

_FOLDER = ".partial"
AT_ONCE = 16
"""Small objects read at once."""


class BucketPart(NamedTuple):
    """One shard: where a worker writes it, and the objects that it becomes."""

    scratch: Path
    out: Address
    number: int

    def being_written(self, suffix: PartSuffix) -> Path:
        return self.scratch / f"part-{self.number:05d}.{os.getpid()}.{suffix}"

    def object(self, suffix: PartSuffix) -> Address:
        if suffix in SHARD_SUFFIXES:
            return self.out / f"{SHARD_FOLDER}/{shard_name(self.number, suffix)}"
        return self.out / f"{_FOLDER}/part-{self.number:05d}.{suffix}"

    def begin(self) -> int:
        """Create the .beton to write, and return its descriptor."""
        for suffix in PART_SUFFIXES:
            self.being_written(suffix).unlink(missing_ok=True)  # of an earlier attempt in this process
        return os.open(self.being_written("beton"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def publish(self, result: ShardResult) -> None:
        """Upload the verified files, then the marker."""
        for suffix in PART_SUFFIXES:
            self.object(suffix).write(self.being_written(suffix))
            self.being_written(suffix).unlink()
        self.object("done.json").write(seal_line(result._asdict()))


class BucketPartial:
    """The objects of an unfinished conversion to `out`. Methods raise as Address does."""

    def __init__(self, out: Address, scratch: Path) -> None:
        self.out, self.scratch = out, scratch
        self.path = out / _FOLDER
        self.tokenizer = scratch / TOKENIZER_FILE
        """The local copy."""
        self.errors = self.path / ERRORS_FILE

    @property
    def in_progress(self) -> bool:
        """Whether there is a conversion to resume."""
        return (self.path / "plan.json").exists() and not self.is_whole

    @property
    def is_whole(self) -> bool:
        return (self.out / INDEX_FILE).exists()

    def clear(self) -> None:
        """Delete what an unfinished conversion left, its plan last. Raises DatasetExistsError if there is more."""
        for name in sorted(self._own_names(), key=lambda name: name == f"{_FOLDER}/plan.json"):
            (self.out / name).delete()

    def _own_names(self) -> list[str]:
        names = [name for name, _ in self.out.objects()]
        ours = (f"{_FOLDER}/", f"{SHARD_FOLDER}/shard-", TOKENIZER_FILE, ERRORS_FILE)
        if others := [name for name in names if not name.startswith(ours)]:
            raise DatasetExistsError(f"{self.out} holds other objects, such as {others[0]!r}; choose another address")
        return names

    def begin(self, plan: Plan) -> None:
        """Begin a conversion by this plan, or join others that began it. Raises DatasetExistsError for another plan."""
        file = self.path / "plan.json"
        with suppress(FileExistsError):  # another process may be first
            file.create(plan.model_dump_json(indent=1).encode())
        refuse_other_plan(plan, file.read(), self.path)
        with suppress(FileNotFoundError):
            write_atomically(self.tokenizer, (self.out / TOKENIZER_FILE).read(MAX_FILE_BYTES))

    def keep_tokenizer(self, text: bytes) -> None:
        """Write the tokenizer, which is the same whichever process makes it."""
        (self.out / TOKENIZER_FILE).write(text)
        write_atomically(self.tokenizer, text)

    def remove_files_of_killed_writers(self) -> None:
        """Do nothing: an object that was not written whole does not exist."""

    remove_leftovers = remove_files_of_killed_writers

    def parts(self, shards: int) -> list[BucketPart]:
        return [BucketPart(self.scratch, self.out, shard) for shard in range(shards)]

    def results(self, shards: int) -> list[ShardResult | None]:
        """Return the result of every shard; None for one that is to be written again."""
        sizes = dict((self.out / SHARD_FOLDER).objects())
        marked = {name for name, _ in self.path.objects()}

        def result(part: BucketPart) -> ShardResult | None:
            marker = part.object("done.json")
            found = read_marker(marker.read()) if marker.name in marked else None
            if found is None or any(
                sizes.get(shard_name(part.number, s)) != found.sizes.get(s) for s in SHARD_SUFFIXES
            ):
                return None
            return found

        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(result, self.parts(shards)))

    def bad_samples(self, shards: int) -> list[BadSample]:
        """Return the samples left out so far, in shard order; keeps their list in an object."""
        self.errors.write(self._gathered(shards))
        return list(read_bad_samples(self.errors))

    def _gathered(self, shards: int) -> bytes:
        there = {name for name, _ in self.path.objects()}

        def lines(part: BucketPart) -> bytes:
            if part.object("errors.jsonl").name in there:
                return part.object("errors.jsonl").read()
            in_progress = next(self.scratch.glob(f"part-{part.number:05d}.*.errors.jsonl"), None)
            return read_regular(in_progress) if in_progress else b""

        with ThreadPoolExecutor(AT_ONCE) as threads:
            return b"".join(threads.map(lines, self.parts(shards)))

    def assemble(self, results: Sequence[ShardResult], index: bytes) -> None:
        """Write errors.jsonl, and dataset.json last.

        Raises DatasetError if a shard is empty, DatasetExistsError if another process has written another dataset.
        """
        if empty := [number for number, result in enumerate(results) if not result.rows]:
            raise DatasetError(f"shard {empty[0]} has no usable sample, and objects cannot be renumbered; convert to a "
                               "local directory and copy it")  # fmt: skip
        (self.out / ERRORS_FILE).write(self._gathered(len(results)))
        try:
            (self.out / INDEX_FILE).create(index)
        except FileExistsError:
            if (self.out / INDEX_FILE).read() != index:
                raise DatasetExistsError(f"{self.out} was written by another conversion in between") from None

    def publish(self) -> None:
        """Do nothing: the dataset is where it stays."""

    def clean_up(self) -> None:
        """Remove what a finished conversion no longer needs, the plan last."""
        if self.is_whole:
            for name, _ in sorted(self.path.objects(), key=lambda found: found[0] == "plan.json"):
                (self.path / name).delete()

    def refuse_existing(self, *, overwrite: bool, resume: bool) -> None:
        """Raise DatasetExistsError if there is a dataset, or an unfinished conversion that is not to be resumed."""
        if self.is_whole:
            what = "exists and was not converted with these settings" if resume else "exists"
            raise DatasetExistsError(f"{self.out} {what}; choose another address, or delete it: an object store cannot "
                                     "replace a dataset at once")  # fmt: skip
        if self.in_progress and not (overwrite or resume):
            raise DatasetExistsError(f"{self.path} holds an unfinished conversion; continue it with --resume, or start "
                                     "over with --overwrite")  # fmt: skip
        self._own_names()


@contextmanager
def in_bucket(out: Address) -> Iterator[BucketPartial]:
    """Return the unfinished conversion to an address, with a local folder for shards in progress."""
    with TemporaryDirectory(prefix="thermopile-convert-") as scratch:
        yield BucketPartial(out, Path(scratch))
