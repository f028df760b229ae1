"""The steps of a conversion: prepare the tokenizer, write shards, assemble the dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ...storage.files import read_regular, sha256_of
from ...storage.place import Place, made_for
from ..dataset_index import TokenizerInfo, seal_index
from ..errors import DatasetError, SourceError
from ..sources import Source
from ..tokenizer import MAX_FILE_BYTES, end_id_of, load_tokenizer, train_tokenizer, vocab_size_of
from .bucket_partial import BucketPartial
from .caption_lengths import in_runs
from .content import content_of
from .marker import ShardResult
from .partial import Partial
from .plan import ConvertSettings, Listings, Plan
from .shard_pool import Counts, Pool

AnyPartial = Partial | BucketPartial

FIRST_REASONS = 3
MAX_NAMED = 8
"""Maximum shards that an error names."""
MAX_TRAINED_ON = 1_000_000
"""Maximum samples for training a tokenizer: more change few merges and take minutes each."""
RUN = 1_000
"""Neighbouring samples taken together from a larger source to train a tokenizer."""


class Job(NamedTuple):
    """The input and settings of a conversion."""

    source: Source
    selection: NDArray[np.int64] | None
    """Sorted source indices, int64 [samples]; None for all."""
    settings: ConvertSettings
    tokenizer: Path | None
    """A given tokenizer.json."""
    plan: Plan

    @classmethod
    def of(
        cls, source: Source, settings: ConvertSettings, selection: NDArray[np.int64] | None, tokenizer: Path | None
    ) -> Self:
        """Plan a conversion. Raises SourceError if nothing is selected, DatasetError for an unusable tokenizer."""
        if tokenizer and source.mode == "pairs":
            load_tokenizer(tokenizer, context_length=settings.context_length)  # fail here rather than in every worker
        plan = Plan.of(source, settings, selection, tokenizer)
        if not plan.selected:
            raise SourceError("no samples are selected; there is nothing to convert")
        return cls(source, selection, settings, tokenizer, plan)


def unfinished(out: Place) -> AnyPartial:
    """Return the conversion to `out`, if any, for inspection."""
    return made_for(out, Partial, lambda address: BucketPartial(address, Path(gettempdir())))


def begin(job: Job, partial: AnyPartial) -> Job:
    """Begin or join a conversion, and return the job with the plan in force. Raises as Partial.begin."""
    plan = partial.begin(job.plan)
    fails = job.settings.on_error == "fail"  # pictures may then be fixed between two attempts
    with suppress(AttributeError):  # a user's source may be frozen
        job.source.unchanged_since = Source.unchanged_since if fails else plan.made_at
    return job._replace(plan=plan)


def prepare_tokenizer(job: Job, partial: AnyPartial) -> None:
    """Copy or train the tokenizer unless it exists; all processes use the first process's."""
    if job.source.mode != "pairs" or partial.tokenizer.is_file():
        return
    if job.tokenizer is not None:
        text = read_regular(job.tokenizer, MAX_FILE_BYTES)
    else:
        captions = job.source.captions(_captions_to_train_on(job))
        text = train_tokenizer(captions, vocab_size=job.settings.vocab_size).to_str(pretty=True).encode()
    partial.keep_tokenizer(text)  # the tokenizer's own `save` does not report a full disk


def _captions_to_train_on(job: Job) -> NDArray[np.int64]:
    """Return sorted source indices: all, or evenly spaced runs of neighbours, which are cheap to read."""
    places = in_runs(job.plan.selected, MAX_TRAINED_ON, RUN)
    return places if job.selection is None else job.selection[places]


class _TooManyBadSamplesError(Exception):
    pass


def write_shards(
    job: Job, partial: AnyPartial, own: slice, pool: Pool, on_progress: Callable[[Counts], None]
) -> tuple[int, int]:
    """Write the unfinished shards of the slice `own`; return the samples processed by this call, and in the slice.

    Raises SourceError if too many samples cannot be used, DatasetError as the pool does.
    """
    count = job.plan.shards
    listings = Listings(
        len(job.source),
        job.selection,
        job.source.chunks(),
        job.settings.seed,
        count,
        picture_bytes=(job.source.stored_bytes() or 0) // len(job.source),
    )
    parts, results = partial.parts(job.plan), partial.results(job.plan)
    of_slice = range(count)[own]
    missing = {shard for shard in of_slice if not results[shard]}
    selected, seen = (sum(listings.sizes[shard] for shard in shards) for shards in (of_slice, missing))

    def watch(counts: Counts) -> None:
        on_progress(counts)
        if _are_too_many(counts.left_out, job):
            raise _TooManyBadSamplesError

    # Count samples left out by other parts too, so that the parts of a broken source do not all run to their end.
    counted = Counts(selected - seen, sum(result.left_out for result in results if result))
    try:
        watch(counted)
        if missing:
            shards = ((parts[shard], listing) for shard, listing in enumerate(listings) if shard in missing)
            pool((job.source, job.settings, partial.tokenizer), shards, counted, watch)
    except _TooManyBadSamplesError:
        raise _too_many_bad_samples(job, partial) from None
    return seen, selected


def _are_too_many(left_out: int, job: Job) -> bool:
    return left_out > job.settings.max_error_rate * job.plan.selected + 1e-9


def _too_many_bad_samples(job: Job, partial: AnyPartial) -> SourceError:
    """Return the error to raise; saves the list of the samples left out so far in a file."""
    bad = partial.bad_samples(job.plan)
    first = "; ".join(f"{sample.uri!r}: {sample.reason}" for sample in bad[:FIRST_REASONS])
    return SourceError(
        f"at least {len(bad):,} of {job.plan.selected:,} samples cannot be used; --max-error-rate allows "
        f"{job.settings.max_error_rate:.3g} of them. The first: {first}. All are listed in {partial.errors}. "
        "Fix the source and start over, or continue with --resume and a higher --max-error-rate"
    )


def assemble(job: Job, partial: AnyPartial) -> None:
    """Complete the dataset's directory from the finished shards.

    Raises DatasetError if a shard is not done, SourceError if too many samples were left out or none is usable.
    """
    plan = job.plan
    results = _all_done(partial.results(plan), partial)
    if _are_too_many(sum(result.left_out for result in results), job):
        raise _too_many_bad_samples(job, partial)
    kept = [result for result in results if result.rows]
    if not kept:
        first = partial.bad_samples(plan)[0]
        raise SourceError(f"none of the {plan.selected:,} samples is usable; the first: {first.uri!r}: {first.reason}")
    info = None
    if job.source.mode == "pairs":
        tokenizer = load_tokenizer(partial.tokenizer, context_length=job.settings.context_length)
        info = TokenizerInfo(
            vocab_size=vocab_size_of(tokenizer),
            context_length=job.settings.context_length,
            end_id=end_id_of(tokenizer),
            truncated=sum(result.truncated for result in kept),
        )
    per_sample = max(result.captions_per_sample for result in kept)
    samples, blank = sum(result.rows for result in kept), sum(result.blank for result in kept)
    content = content_of(partial.row_records(plan), samples, pairs=info is not None, blank=blank)
    index = seal_index(
        {
            "n": samples,
            "mode": job.source.mode,
            "captions_per_sample": per_sample,
            **({"captions": sum(result.captions for result in kept)} if per_sample > 1 else {}),
            "first_id": np.cumsum([0, *(result.rows for result in kept)]).tolist(),
            "image": job.settings.image.model_dump(),
            "tokenizer": info.model_dump() if info else None,
            "tokenizer_digest": sha256_of(partial.tokenizer) if info else None,
            "shard_digests": [result.digests for result in kept],
            "grown_from": None,
            "source": plan.source
            | {
                "samples": plan.samples,
                "permutation_seed": plan.seed,
                "plan": plan.digest(),
                "content": content.model_dump(),
            },
        }
    )
    partial.assemble(plan, results, index)


def _all_done(results: Sequence[ShardResult | None], partial: AnyPartial) -> list[ShardResult]:
    if missing := [str(shard) for shard, result in enumerate(results) if result is None]:
        named = ", ".join(missing[:MAX_NAMED]) + (f" and {len(missing) - MAX_NAMED} more" * (len(missing) > MAX_NAMED))
        raise DatasetError(
            f"{len(missing):,} of {len(results):,} shards of {partial.out} are not done: {named}. Run their parts "
            "again: with --part I/K, part I has the shards I - 1, I - 1 + K, …; without --part, continue with --resume"
        )
    return [result for result in results if result]
