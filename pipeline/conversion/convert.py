"""Convert a source of samples to a dataset directory, atomically.

The output depends on the source, the selection, the seed and the settings, but not on the number of workers or on
interruptions. plan.py decides which sample goes where, shard_pool.py and shard_writer.py write the shards, and
partial.py keeps finished work and renames it in the end.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...files import sha256_of, sync, write_atomically
from ..cores import cores
from ..dataset_index import (
    CAPTIONS_PER_SAMPLE,
    ERRORS_FILE,
    FORMAT,
    TokenizerInfo,
    read_index,
    seal_index,
)
from ..errors import DatasetError, SourceError
from ..sources import Source
from ..tokenizer import end_id_of, load_tokenizer, train_tokenizer, vocab_size_of
from .bad_samples import BadSample, count_reasons, read_bad_samples
from .partial import Partial, ShardResult, claimed, refuse_existing
from .plan import ConvertSettings, Plan, cut_into_shards
from .shard_pool import Counts, Job, convert_shards

__all__ = ["ConvertSettings", "Summary", "convert"]

FIRST_REASONS = 3


@dataclass(frozen=True)
class Summary:
    """The result of a conversion."""

    path: Path
    samples: int
    shards: int
    left_out: int
    reasons: list[tuple[str, int]]
    """Reasons why samples were left out, most frequent first, with counts."""
    truncated: int
    """Number of truncated captions."""
    seen: int
    """Samples processed by this call; the counts above include earlier, interrupted calls."""
    seconds: float


def convert(
    source: Source,
    out: Path,
    settings: ConvertSettings,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    selection: NDArray[np.int64] | None = None,
    tokenizer_from: Path | None = None,
    on_progress: Callable[[Counts], None] = lambda counts: None,
) -> Summary:
    """Write the dataset directory `out` atomically.

    overwrite: replace `out` if it is a dataset, once the new one is complete; start over after an interruption.
    resume: continue an interrupted conversion, if any; do nothing if `out` was made by the same plan.
    selection: sorted source indices, int64 [samples], to convert instead of all.
    tokenizer_from: use this tokenizer.json instead of training one, as test sets must; overrides settings.tokenizer.
    Calls on_progress a few times a second.

    A conversion that fails or is interrupted stays in `.OUT.partial`, for resume. Raises DatasetExistsError as
    refuse_existing does, if another process is converting to `out`, and on resume if another plan was started or
    version 0.1.0 wrote the dataset; SourceError if a sample, or too many of them, cannot be used; DatasetError if a
    worker dies or the disk is full or failing.
    """
    started = time.monotonic()
    tokenizer = tokenizer_from or settings.tokenizer
    if tokenizer and source.mode == "pairs":
        load_tokenizer(tokenizer, context_length=settings.context_length)  # fail here rather than in every worker
    plan = Plan.of(source, settings, selection, tokenizer)
    if not plan.selected:
        raise SourceError("no samples are selected; there is nothing to convert")
    seen = 0
    with _told_where_no_room_is_left(out), claimed(out) as partial:
        if not (resume and not partial.in_progress and _was_made_by(plan, out)):
            run = _Run(source, np.arange(len(source)) if selection is None else selection, settings, plan, partial)
            run.begin(tokenizer, overwrite, resume)
            if partial.is_whole:
                partial.refuse_other_format()
            else:
                seen = run.write_shards(workers or cores(), on_progress)
                run.assemble()
            partial.publish()
        partial.remove_replaced()
    return _summary(out, seen, started)


@contextmanager
def _told_where_no_room_is_left(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DatasetError(
            f"cannot write to {out.parent.resolve()}: {os.strerror(error.errno)}. "
            "Free some space there, then continue with the same command and --resume"
        ) from error


def _was_made_by(plan: Plan, out: Path) -> bool:
    try:
        index = read_index(out)
    except DatasetError:
        return False
    return index.format == FORMAT and index.source.get("plan") == plan.digest()


class _TooManyBadSamplesError(Exception):
    pass


@dataclass(frozen=True)
class _Run:
    """The steps of one conversion, in order; another process can resume each."""

    source: Source
    chosen: NDArray[np.int64]
    settings: ConvertSettings
    plan: Plan
    partial: Partial

    def begin(self, tokenizer: Path | None, overwrite: bool, resume: bool) -> None:
        """Prepare to write shards: in an empty directory, or resuming a conversion with the same plan."""
        refuse_existing(self.partial.out, overwrite=overwrite, resume=resume)
        if resume and self.partial.in_progress:
            self.partial.refuse_other(self.plan)
            self.partial.sweep()
            return
        self.partial.clear()
        if self.source.mode == "pairs":
            self._prepare_tokenizer(tokenizer)
        self.partial.record(self.plan)

    def _prepare_tokenizer(self, given: Path | None) -> None:
        path = self.partial.tokenizer
        if given is not None:
            shutil.copyfile(given, path)
        else:
            captions = self.source.captions(self.chosen)
            tokenizer = train_tokenizer(captions, vocab_size=self.settings.vocab_size)
            # Not with its own `save`, whose errors do not report a full disk.
            write_atomically(path, tokenizer.to_str(pretty=True).encode())
        sync(path)

    def write_shards(self, workers: int, on_progress: Callable[[Counts], None]) -> int:
        """Write the shards that are not done yet and return their number of samples."""
        picture_bytes = (self.source.stored_bytes() or 0) // len(self.source)
        listings = cut_into_shards(
            self.chosen, self.source.chunks(), self.settings.seed, self.plan.shards, picture_bytes=picture_bytes
        )
        shards = list(zip(self.partial.parts(self.plan.shards), listings, strict=True))
        done = [result for part, _ in shards if (result := part.result())]
        missing = [(part, listing) for part, listing in shards if part.result() is None]
        seen = sum(len(listing) for _, listing in missing)

        def watch(counts: Counts) -> None:
            on_progress(counts)
            if counts.left_out > self.settings.max_error_rate * self.plan.selected + 1e-9:
                raise _TooManyBadSamplesError

        counted = Counts(self.plan.selected - seen, sum(result.left_out for result in done))
        try:
            watch(counted)
            if missing:
                job = Job(self.source, self.settings, self.partial.tokenizer)
                convert_shards(job, missing, counted, workers, watch)
        except _TooManyBadSamplesError:
            raise SourceError(self._too_many()) from None
        return seen

    def _too_many(self) -> str:
        bad = self._list_bad_samples()
        first = "; ".join(f"{sample.uri!r}: {sample.reason}" for sample in bad[:FIRST_REASONS])
        return (
            f"at least {len(bad):,} of {self.plan.selected:,} samples cannot be used; --max-error-rate "
            f"allows {self.settings.max_error_rate:.3g} of them. The first: {first}. All are listed in "
            f"{self.partial.errors}. Fix the source, or continue with --resume and a higher --max-error-rate"
        )

    def _list_bad_samples(self) -> list[BadSample]:
        """Return all samples left out so far, and keep them in a file."""
        self.partial.gather_errors(self.partial.parts(self.plan.shards), self.partial.errors)
        return list(read_bad_samples(self.partial.errors))

    def assemble(self) -> None:
        """Complete the dataset's directory from the finished shards."""
        parts = self.partial.parts(self.plan.shards)
        results = [result for part in parts if (result := part.result())]
        kept = [result for result in results if result.rows]
        if not kept:
            first = self._list_bad_samples()[0]
            raise SourceError(
                f"none of the {self.plan.selected:,} samples is usable; the first: {first.uri!r}: {first.reason}"
            )
        pairs = self.source.mode == "pairs"
        index = seal_index({
            "n": sum(result.rows for result in kept),
            "mode": self.source.mode,
            "captions_per_sample": CAPTIONS_PER_SAMPLE if pairs else 0,
            "first_id": np.cumsum([0, *(result.rows for result in kept)]).tolist(),
            "image": self.settings.image.model_dump(),
            "tokenizer": self._tokenizer_info(kept) if pairs else None,
            "tokenizer_digest": sha256_of(self.partial.tokenizer) if pairs else None,
            "shard_digests": [result.digests for result in kept],
            "grown_from": None,
            "source": self.plan.source
            | {"samples": self.plan.samples, "permutation_seed": self.plan.seed, "plan": self.plan.digest()},
        })  # fmt: skip
        self.partial.assemble(parts, results, index)

    def _tokenizer_info(self, results: list[ShardResult]) -> dict[str, Any]:
        tokenizer = load_tokenizer(self.partial.tokenizer, context_length=self.settings.context_length)
        return TokenizerInfo(
            vocab_size=vocab_size_of(tokenizer),
            context_length=self.settings.context_length,
            end_id=end_id_of(tokenizer),
            truncated=sum(result.truncated for result in results),
        ).model_dump()


def _summary(out: Path, seen: int, started: float) -> Summary:
    index = read_index(out)
    reasons = count_reasons(read_bad_samples(out / ERRORS_FILE))
    return Summary(
        path=out,
        samples=index.n,
        shards=len(index.first_id) - 1,
        left_out=reasons.total(),
        reasons=reasons.most_common(FIRST_REASONS),
        truncated=index.tokenizer.truncated if index.tokenizer else 0,
        seen=seen,
        seconds=time.monotonic() - started,
    )
