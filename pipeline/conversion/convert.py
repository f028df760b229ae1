"""Convert a source of samples to a dataset directory, atomically.

The output depends on the source, the selection, the seed and the settings, but not on the number of workers or on
interruptions. plan.py decides which sample goes where, shard_pool.py and shard_writer.py write the shards, and
partial.py keeps finished work and renames it in the end.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...files import sha256_of, sync, write_atomically
from ..cores import cores
from ..dataset_index import ERRORS_FILE, FORMAT, TokenizerInfo, read_index, seal_index
from ..errors import DatasetError, SourceError
from ..sources import Source
from ..tokenizer import end_id_of, load_tokenizer, train_tokenizer, vocab_size_of
from .partial import BadSample, Partial, claimed, count_reasons, read_bad_samples, refuse_existing
from .plan import ConvertSettings, Plan, cut_into_shards
from .shard_pool import Counts, convert_shards

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
    captions: int
    captions_per_sample: int
    """Maximum captions per sample."""
    truncated: int
    """Number of truncated captions."""
    seen: int
    """Samples processed by this call; the counts above include earlier, interrupted calls."""
    seconds: float


def convert(
    source: Source, out: Path, settings: ConvertSettings, *, workers: int | None = None, overwrite: bool = False,
    resume: bool = False, selection: NDArray[np.int64] | None = None, tokenizer_from: Path | None = None,
    on_progress: Callable[[Counts], None] = lambda counts: None,
) -> Summary:  # fmt: skip
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
    started, seen = time.monotonic(), 0
    tokenizer = tokenizer_from or settings.tokenizer
    if tokenizer and source.mode == "pairs":
        load_tokenizer(tokenizer, context_length=settings.context_length)  # fail here rather than in every worker
    plan = Plan.of(source, settings, selection, tokenizer)
    if not plan.selected:
        raise SourceError("no samples are selected; there is nothing to convert")
    selected = np.arange(len(source)) if selection is None else selection
    with _full_disk_explained(out), claimed(out) as partial:
        if not (resume and not partial.in_progress and _was_made_by(plan, out)):
            refuse_existing(out, overwrite=overwrite, resume=resume)
            if resume and partial.in_progress:
                partial.resume(plan)
            else:
                partial.clear()
                if source.mode == "pairs":
                    _prepare_tokenizer(partial.tokenizer, tokenizer, source, selected, settings)
                partial.record(plan)
            if not partial.is_whole:
                seen = _write_shards(source, selected, settings, plan, partial, workers or cores(), on_progress)
                _assemble(settings, plan, partial, source.mode)
            partial.publish()
        partial.remove_replaced()
    return _summary(out, seen, started)


@contextmanager
def _full_disk_explained(out: Path) -> Iterator[None]:
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


def _prepare_tokenizer(
    path: Path, given: Path | None, source: Source, selected: NDArray[np.int64], settings: ConvertSettings
) -> None:
    if given is not None:
        shutil.copyfile(given, path)
        sync(path)
    else:
        tokenizer = train_tokenizer(source.captions(selected), vocab_size=settings.vocab_size)
        # Not with its own `save`, whose errors do not report a full disk.
        write_atomically(path, tokenizer.to_str(pretty=True).encode())


class _TooManyBadSamplesError(Exception):
    pass


def _write_shards(
    source: Source, selected: NDArray[np.int64], settings: ConvertSettings, plan: Plan, partial: Partial, workers: int,
    on_progress: Callable[[Counts], None],
) -> int:  # fmt: skip
    """Write the shards that are not done yet and return their number of samples."""
    picture_bytes = (source.stored_bytes() or 0) // len(source)
    listings = cut_into_shards(selected, source.chunks(), settings.seed, plan.shards, picture_bytes=picture_bytes)
    parts = partial.parts(plan.shards)
    results = [part.result() for part in parts]
    missing = [pair for pair, result in zip(zip(parts, listings, strict=True), results, strict=True) if not result]
    seen = sum(len(listing) for _, listing in missing)

    def watch(counts: Counts) -> None:
        on_progress(counts)
        if counts.left_out > settings.max_error_rate * plan.selected + 1e-9:
            raise _TooManyBadSamplesError

    counted = Counts(plan.selected - seen, sum(result.left_out for result in results if result))
    try:
        watch(counted)
        if missing:
            convert_shards((source, settings, partial.tokenizer), missing, counted, workers, watch)
    except _TooManyBadSamplesError:
        bad = _bad_samples(plan, partial)
        first = "; ".join(f"{sample.uri!r}: {sample.reason}" for sample in bad[:FIRST_REASONS])
        raise SourceError(
            f"at least {len(bad):,} of {plan.selected:,} samples cannot be used; --max-error-rate allows "
            f"{settings.max_error_rate:.3g} of them. The first: {first}. All are listed in {partial.errors}. "
            "Fix the source, or continue with --resume and a higher --max-error-rate"
        ) from None
    return seen


def _bad_samples(plan: Plan, partial: Partial) -> list[BadSample]:
    """Return all samples left out so far, and keep them in a file."""
    partial.gather_errors(partial.parts(plan.shards), partial.errors)
    return list(read_bad_samples(partial.errors))


def _assemble(settings: ConvertSettings, plan: Plan, partial: Partial, mode: str) -> None:
    """Complete the dataset's directory from the finished shards."""
    parts = partial.parts(plan.shards)
    results = [result for part in parts if (result := part.result())]
    kept = [result for result in results if result.rows]
    if not kept:
        first = _bad_samples(plan, partial)[0]
        raise SourceError(f"none of the {plan.selected:,} samples is usable; the first: {first.uri!r}: {first.reason}")
    info = None
    if mode == "pairs":
        tokenizer = load_tokenizer(partial.tokenizer, context_length=settings.context_length)
        info = TokenizerInfo(
            vocab_size=vocab_size_of(tokenizer), context_length=settings.context_length, end_id=end_id_of(tokenizer),
            truncated=sum(result.truncated for result in kept),
        )  # fmt: skip
    per_sample = max(result.captions_per_sample for result in kept)
    index = seal_index({
        "n": sum(result.rows for result in kept),
        "mode": mode,
        "captions_per_sample": per_sample,
        **({"captions": sum(result.captions for result in kept)} if per_sample > 1 else {}),
        "first_id": np.cumsum([0, *(result.rows for result in kept)]).tolist(),
        "image": settings.image.model_dump(),
        "tokenizer": info.model_dump() if info else None,
        "tokenizer_digest": sha256_of(partial.tokenizer) if info else None,
        "shard_digests": [result.digests for result in kept],
        "grown_from": None,
        "source": plan.source | {"samples": plan.samples, "permutation_seed": plan.seed, "plan": plan.digest()},
    })  # fmt: skip
    partial.assemble(parts, results, index)


def _summary(out: Path, seen: int, started: float) -> Summary:
    index = read_index(out)
    reasons = count_reasons(read_bad_samples(out / ERRORS_FILE))
    return Summary(
        path=out, samples=index.n, shards=len(index.first_id) - 1, left_out=reasons.total(),
        reasons=reasons.most_common(FIRST_REASONS), captions=index.total_captions,
        captions_per_sample=index.captions_per_sample, truncated=index.tokenizer.truncated if index.tokenizer else 0,
        seen=seen, seconds=time.monotonic() - started,
    )  # fmt: skip
