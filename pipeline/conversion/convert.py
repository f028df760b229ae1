"""Convert a source of samples to a dataset directory, atomically, on one machine or in parts on several.

The output depends on the source, the selection, the seed and the settings, but not on the number of workers, parts or
machines, or on interruptions. plan.py assigns samples to shards, steps.py has the steps, shard_pool.py or on_ray.py and
shard_writer.py write the shards, and partial.py keeps finished work and renames it at the end.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...storage.place import AnyPlace, Place, made_for, place_of
from ..dataset_index import ERRORS_FILE, DatasetIndex, read_index
from ..errors import DatasetError, SourceChangedError, SourceError
from ..sources import Selection, Source
from .bad_samples import count_reasons, read_bad_samples
from .bucket_partial import in_bucket
from .partial import claimed
from .plan import ConvertSettings, Plan
from .shard_pool import Pool, processes
from .steps import FIRST_REASONS, AnyPartial, Job, assemble, begin, unfinished, write_parts
from .work import Counts

__all__ = ["ConvertSettings", "PartNumber", "PartSummary", "Summary", "convert", "convert_part", "finish"]


@dataclass(frozen=True)
class Summary:
    """The result of a conversion."""

    path: Place
    index: DatasetIndex
    left_out: int
    reasons: list[tuple[str, int]]
    """Reasons for leaving out samples, most frequent first, with counts."""
    seen: int
    """Samples processed by this call; the counts above include earlier, interrupted calls."""
    seconds: float


@dataclass(frozen=True)
class PartNumber:
    """The shards of one process: every `count`-th, beginning with shard `number` - 1."""

    number: int
    """1 … count."""
    count: int

    @property
    def shards(self) -> slice:
        return slice(self.number - 1, None, self.count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True)
class PartSummary:
    """The result of one part of a conversion."""

    samples: int
    """Samples of the part, usable or not."""
    seen: int
    """Samples processed by this call."""
    shards: int
    """Shards of the whole dataset."""
    shards_done: int
    """Number of finished shards, of this part and others."""
    seconds: float


def convert(
    source: Source,
    out: AnyPlace,
    settings: ConvertSettings,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    selection: Selection = None,
    tokenizer_from: Path | None = None,
    lengths: tuple[int, int] | None = None,
    on_progress: Callable[[Counts], None] = lambda counts: None,
    tell: Callable[[str], None] = lambda words: None,
) -> Summary:
    """Write the dataset directory `out` atomically.

    overwrite: replace `out` if it is a dataset, once the new one is complete; start over after an interruption.
    resume: continue an interrupted conversion, if any; do nothing if `out` was made by the same plan.
    selection: sorted source indices, int64 [samples], to convert instead of all; for tars, a rule that draws them.
    tokenizer_from: use this tokenizer.json instead of training one, as test sets must; overrides settings.tokenizer.
    lengths: vocabulary size and context length that go with it, see lengths_of.
    Calls on_progress a few times a second, and tell with what is done before.

    A conversion that fails or is interrupted stays in `.OUT.partial`, for resume. Raises DatasetExistsError as
    refuse_existing does, if another process is converting to `out`, and on resume if another plan was started or its
    dataset cannot be read; SourceError if a sample, or too many samples, cannot be used; DatasetError if a worker dies
    or the disk is full or failing.
    """
    out, started, seen = place_of(out), time.monotonic(), 0
    job = Job.of(source, settings, selection, tokenizer_from or settings.tokenizer, lengths)
    with _errors_explained(out), _claimed(out) as partial:
        if not (resume and not partial.in_progress and _was_made_by(job.plan, out)):
            partial.refuse_existing(overwrite=overwrite, resume=resume)
            if not (resume and partial.in_progress):
                partial.clear()
            job = begin(job, partial, tell)
            partial.remove_leftovers()
            if not partial.is_whole:
                seen, _ = write_parts(job, partial, slice(None), processes(workers), on_progress)
                assemble(job, partial)
            partial.publish()
        partial.clean_up()
    return _summary(out, seen, started)


def convert_part(
    source: Source,
    out: AnyPlace,
    settings: ConvertSettings,
    part: PartNumber,
    *,
    workers: int | None = None,
    pool: Pool | None = None,
    overwrite: bool = False,
    selection: Selection = None,
    tokenizer_from: Path | None = None,
    lengths: tuple[int, int] | None = None,
    on_progress: Callable[[Counts], None] = lambda counts: None,
    tell: Callable[[str], None] = lambda words: None,
    on_begun: Callable[[], None] | None = None,
) -> PartSummary:
    """Write one part's unfinished shards; `finish` combines all parts into a dataset. May be repeated.

    pool: writes the parts in place of worker processes. on_begun: called before any other process that converts to
    `out` goes on, once the plan exists. overwrite: `finish` may replace the dataset at `out`. Other
    arguments and errors as `convert`. Processes on any machine that shares the file system may convert other parts at
    the same time.
    """
    out, started = place_of(out), time.monotonic()
    job = Job.of(source, settings, selection, tokenizer_from or settings.tokenizer, lengths)
    if done_before := _finished(job.plan, out, unfinished(out)):  # parts of one must not collide at the lock
        return done_before
    with _errors_explained(out), _claimed(out, shared=True) as partial:
        if done_before := _finished(job.plan, out, partial):
            return done_before
        partial.refuse_existing(overwrite=overwrite, resume=True)
        job = begin(job, partial, tell, on_begun)
        partial.remove_files_of_killed_writers()
        seen, samples = write_parts(job, partial, part.shards, pool or processes(workers), on_progress)
        done = sum(result is not None for result in partial.results(job.plan))
    return PartSummary(samples, seen, job.plan.parts, done, time.monotonic() - started)


def begin_only(
    source: Source,
    out: AnyPlace,
    settings: ConvertSettings,
    selection: Selection,
    tokenizer_from: Path | None,
    lengths: tuple[int, int] | None = None,
    *,
    overwrite: bool,
) -> None:
    """Begin a conversion that later calls of `convert_part` join, unless it has begun. Raises as they do."""
    out = place_of(out)
    job = Job.of(source, settings, selection, tokenizer_from or settings.tokenizer, lengths)
    with _errors_explained(out), _claimed(out, shared=True) as partial:
        if not partial.in_progress and not _was_made_by(job.plan, out):
            partial.refuse_existing(overwrite=overwrite, resume=True)
            begin(job, partial, lambda words: None)


def finish(
    source: Source,
    out: AnyPlace,
    settings: ConvertSettings,
    *,
    overwrite: bool = False,
    selection: Selection = None,
    tokenizer_from: Path | None = None,
    lengths: tuple[int, int] | None = None,
) -> Summary:
    """Combine the parts into a dataset, byte for byte as `convert` writes it, and publish it. May be repeated.

    Reads every shard of a directory back. Raises DatasetError if parts are missing, damaged, or of another plan or
    version; SourceError if too many samples were left out; otherwise as `convert`.
    """
    out, started = place_of(out), time.monotonic()
    job = Job.of(source, settings, selection, tokenizer_from or settings.tokenizer, lengths)
    with _errors_explained(out), _claimed(out) as partial:
        if partial.in_progress or not _was_made_by(job.plan, out):
            if not partial.in_progress:
                partial.refuse_existing(overwrite=overwrite, resume=True)
                raise DatasetError(f"no part of {out} has been converted; run the same command with --part 1/K … K/K")
            partial.refuse_existing(overwrite=overwrite, resume=True)
            job = begin(job, partial, lambda words: None)
            partial.remove_leftovers()
            if not partial.is_whole:
                partial.remove_damaged(job.plan)
                assemble(job, partial)
            partial.publish()
        partial.clean_up()
    return _summary(out, 0, started)


def lengths_of(out: Place) -> tuple[int, int] | None:
    """Return vocabulary size and context length of a dataset, unfinished or not; None if it has no captions."""
    if (facts := unfinished(out).facts) is not None:
        return facts.vocab_size, facts.context_length
    info = read_index(out).tokenizer
    return (info.vocab_size, info.context_length) if info else None


def _claimed(out: Place, *, shared: bool = False) -> AbstractContextManager[AnyPartial]:
    return made_for(out, lambda path: claimed(path, shared=shared), in_bucket)


@contextmanager
def _errors_explained(out: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DatasetError(
            f"cannot write to {unfinished(out).disk}: {os.strerror(error.errno)}. "
            "Free some space there, then continue with the same command and --resume"
        ) from error
    except SourceChangedError as error:
        raise SourceError(f"{error} without --resume: remove {unfinished(out).begun} and convert again") from error


def _finished(plan: Plan, out: Place, partial: AnyPartial) -> PartSummary | None:
    """Return a part's result if the conversion is finished."""
    if partial.in_progress or not _was_made_by(plan, out):
        return None
    shards = len(read_index(out).shard_digests)
    return PartSummary(0, 0, shards, shards, 0)


def _was_made_by(plan: Plan, out: Place) -> bool:
    try:
        index = read_index(out)
    except DatasetError:
        return False
    return index.source.get("plan") == plan.digest()


def _summary(out: Place, seen: int, started: float) -> Summary:
    reasons = count_reasons(read_bad_samples(out / ERRORS_FILE))
    return Summary(
        path=out,
        index=read_index(out),
        left_out=reasons.total(),
        reasons=reasons.most_common(FIRST_REASONS),
        seen=seen,
        seconds=time.monotonic() - started,
    )
