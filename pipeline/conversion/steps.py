"""The steps of a conversion: prepare the tokenizer, write shards, assemble the dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple, Self

import numpy as np

from ...storage.files import read_regular, sha256_of
from ...storage.place import Place, made_for
from ..dataset_index import TokenizerInfo, seal_index
from ..errors import DatasetError, DatasetExistsError, SourceError
from ..sources import NEVER, Asked, Facts, Selection, Source
from ..sources.caption_lengths import CONTEXTS
from ..tokenizer import MAX_FILE_BYTES, end_id_of, load_tokenizer, train_tokenizer, vocab_size_of
from .bucket_partial import BucketPartial
from .content import content_of
from .marker import Found, PartResult, stem
from .partial import Partial
from .plan import ConvertSettings, Plan
from .shard_pool import Pool
from .work import Counts

AnyPartial = Partial | BucketPartial

FIRST_REASONS = 3
LEAST_SEEN = 1_000
"""Samples of tars to see before a share of them counts as too large."""
MAX_NAMED = 8
"""Maximum shards that an error names."""


class Job(NamedTuple):
    """The input and settings of a conversion."""

    source: Source
    settings: ConvertSettings
    asked: Asked
    plan: Plan
    lengths: tuple[int, int] | None = None
    """Vocabulary size and context length of the dataset whose tokenizer is used."""

    @classmethod
    def of(
        cls,
        source: Source,
        settings: ConvertSettings,
        selection: Selection,
        tokenizer: Path | None,
        lengths: tuple[int, int] | None = None,
    ) -> Self:
        """Plan a conversion. Raises SourceError if nothing is selected, DatasetError for an unusable tokenizer."""
        if tokenizer and source.mode != "images":
            # Fail here rather than in every worker.
            load_tokenizer(tokenizer, context_length=settings.context_length or CONTEXTS[-1])
        asked = Asked(settings.seed, selection, settings.vocab_size, settings.context_length, tokenizer)
        plan = Plan.of(source, settings, asked)
        if plan.selected == 0:
            raise SourceError("no samples are selected; there is nothing to convert")
        return cls(source, settings, asked, plan, lengths)

    @property
    def facts(self) -> Facts:
        """Once the conversion has begun."""
        assert self.plan.facts is not None
        return self.plan.facts

    def learned(self, tell: Callable[[str], None]) -> Self:
        """Return the job with the facts in its plan."""
        vocab_size, context_length = self.lengths or (self.asked.vocab_size, self.asked.context_length)
        asked = self.asked._replace(vocab_size=vocab_size, context_length=context_length)
        return self._replace(plan=self.plan.model_copy(update={"facts": self.source.facts(asked, tell)}))

    def begun(self, plan: Plan) -> Self:
        """Return the job with the plan in force and what it decides. Raises DatasetExistsError if that is damaged."""
        if plan.facts is None or not self.source.is_of(plan.facts):
            raise DatasetExistsError("the conversion's plan.json is damaged; remove it, and start over")
        chosen = {"vocab_size": plan.facts.vocab_size, "context_length": plan.facts.context_length}
        return self._replace(plan=plan, settings=self.settings.model_copy(update=chosen))


def unfinished(out: Place) -> AnyPartial:
    """Return the conversion to `out`, if any, for inspection."""
    return made_for(out, Partial, lambda address: BucketPartial(address, Path(gettempdir())))


def begin(
    job: Job, partial: AnyPartial, tell: Callable[[str], None], on_begun: Callable[[], None] | None = None
) -> Job:
    """Begin or join a conversion, with its tokenizer, and return the job with the plan in force.

    One process learns the facts and trains the tokenizer, and the others wait for it; on_begun is called while they do.
    Raises as Partial.begin.
    """
    if partial.in_progress and on_begun is None and not _lacks_tokenizer(joined := _joined(job, partial), partial):
        return joined
    with partial.beginning(tell):
        if not partial.in_progress:
            job = job.learned(tell)
        job = _joined(job, partial)
        if _lacks_tokenizer(job, partial):
            partial.keep_tokenizer(_tokenizer(job))  # the tokenizer's own `save` does not report a full disk
        if on_begun:
            on_begun()
    return job


def _joined(job: Job, partial: AnyPartial) -> Job:
    """Begin by the job's plan, or join a conversion."""
    return job.begun(partial.begin(job.plan))


def _lacks_tokenizer(job: Job, partial: AnyPartial) -> bool:
    return job.facts.mode == "pairs" and not partial.tokenizer.is_file()


def _tokenizer(job: Job) -> bytes:
    """Copy or train the tokenizer; all processes use the first process's."""
    if job.asked.tokenizer is not None:
        return read_regular(job.asked.tokenizer, MAX_FILE_BYTES)
    captions = job.source.training_captions(job.asked)
    return train_tokenizer(captions, vocab_size=job.settings.vocab_size).to_str(pretty=True).encode()


class _TooManyBadSamplesError(Exception):
    pass


def write_parts(
    job: Job, partial: AnyPartial, own: slice, pool: Pool, on_progress: Callable[[Counts], None]
) -> tuple[int, int]:
    """Write the unfinished parts of the slice `own`; return the samples processed by this call, and in the slice.

    Raises SourceError if too many samples cannot be used, DatasetError as the pool does.
    """
    files, results = partial.parts(job.plan), partial.results(job.plan)
    missing = [part for part in range(job.plan.parts)[own] if not results[part]]
    before = sum(result.rows + result.found.left_out for result in results[own] if result)

    def watch(counts: Counts) -> None:
        on_progress(counts)
        if _are_too_many(counts.left_out, counts.seen, job):
            raise _TooManyBadSamplesError

    # Count samples of other parts too, so that the parts of a broken source do not all run to their end.
    left_out = sum(result.found.left_out for result in results if result)
    seen = left_out + sum(result.rows for result in results if result)
    counted = Counts(_done_of(job, results, own), seen, left_out)
    try:
        watch(counted)
        if missing:
            fails = job.settings.on_error == "fail"  # pictures may then be fixed between two attempts
            works = job.source.works(
                job.facts, job.asked, job.plan.parts, unchanged_since=NEVER if fails else job.plan.made_at
            )
            wanted = {*missing}
            parts = ((files[part], work) for part, work in enumerate(works) if part in wanted)
            pool((job.source, job.settings, partial.tokenizer), parts, counted, watch)
    except _TooManyBadSamplesError:
        raise _too_many_bad_samples(job, partial, job.plan.selected) from None
    now = sum(result.rows + result.found.left_out for result in partial.results(job.plan)[own] if result)
    return now - before, now


def _done_of(job: Job, results: Sequence[PartResult | None], own: slice) -> int:
    """Return how much of the slice is done, as progress counts it."""
    if job.facts.groups is None:
        return sum(result.rows + result.found.left_out for result in results[own] if result)
    groups = zip(job.facts.groups[own], results[own], strict=True)
    return sum(piece.stop - piece.start for group, result in groups if result for piece in group)


def _are_too_many(left_out: int, seen: int, job: Job) -> bool:
    total = max(seen, LEAST_SEEN) if job.plan.selected is None else job.plan.selected
    return left_out > job.settings.max_error_rate * total + 1e-9


def _too_many_bad_samples(job: Job, partial: AnyPartial, total: int | None) -> SourceError:
    """Return the error to raise; saves the list of the samples left out so far in a file. total: None if unknown."""
    bad = partial.bad_samples(job.plan)
    first = "; ".join(f"{sample.uri!r}: {sample.reason}" for sample in bad[:FIRST_REASONS])
    of_all = f" of {total:,}" if total is not None else ""
    return SourceError(
        f"at least {len(bad):,}{of_all} samples cannot be used; --max-error-rate allows "
        f"{job.settings.max_error_rate:.3g} of them. The first: {first}. All are listed in {partial.errors}. "
        "Fix the source and start over, or continue with --resume and a higher --max-error-rate"
    )


def assemble(job: Job, partial: AnyPartial) -> None:
    """Complete the dataset's directory from the finished shards.

    Raises DatasetError if a shard is not done, SourceError if too many samples were left out or none is usable.
    """
    plan = job.plan
    results = _all_done(partial.results(plan), partial)
    samples, found = sum(result.rows for result in results), Found.sum_of([result.found for result in results])
    left_out = found.left_out
    if left_out > job.settings.max_error_rate * (samples + left_out) + 1e-9:
        raise _too_many_bad_samples(job, partial, samples + left_out)
    shards = [shard for result in results for shard in result.shards]
    if not shards:
        first = partial.bad_samples(plan)[0]
        raise SourceError(f"none of the {left_out:,} samples is usable; the first: {first.uri!r}: {first.reason}")
    info = None
    if job.facts.mode == "pairs":
        length = job.settings.context_length
        tokenizer = load_tokenizer(partial.tokenizer, context_length=length)
        info = TokenizerInfo(
            vocab_size=vocab_size_of(tokenizer),
            context_length=length,
            end_id=end_id_of(tokenizer),
            truncated=found.truncated,
        )
    per_sample = max(shard.captions_per_sample for shard in shards)
    tars = job.source.index
    content = content_of(partial.row_records(plan, results), samples, pairs=info is not None, blank=found.blank)
    index = seal_index(
        {
            "n": samples,
            "mode": job.facts.mode,
            "captions_per_sample": per_sample,
            **({"captions": sum(shard.captions for shard in shards)} if per_sample > 1 else {}),
            "first_id": np.cumsum([0, *(shard.rows for shard in shards)]).tolist(),
            "shards": tuple(
                stem(part, shard) for part, result in enumerate(results) for shard in range(len(result.shards))
            ),
            "image": job.settings.image.model_dump(),
            "tokenizer": info.model_dump() if info else None,
            "tokenizer_digest": sha256_of(partial.tokenizer) if info else None,
            "tars": tars and tars.model_dump(),
            "shard_digests": [shard.digests for shard in shards],
            "grown_from": None,
            "source": plan.source
            | {
                "samples": samples + left_out if plan.samples is None else plan.samples,
                "permutation_seed": plan.seed,
                "plan": plan.digest(),
                "content": content.model_dump(),
                **({"captions_ignored": found.ignored} if found.ignored else {}),
                **({"pictures_in_tars": found.in_tars} if tars else {}),
            },
        }
    )
    partial.assemble(plan, results, index)


def _all_done(results: Sequence[PartResult | None], partial: AnyPartial) -> list[PartResult]:
    if missing := [str(shard) for shard, result in enumerate(results) if result is None]:
        named = ", ".join(missing[:MAX_NAMED]) + (f" and {len(missing) - MAX_NAMED} more" * (len(missing) > MAX_NAMED))
        raise DatasetError(
            f"{len(missing):,} of {len(results):,} shards of {partial.out} are not done: {named}. Run their parts "
            "again: with --part I/K, part I has the shards I - 1, I - 1 + K, …; without --part, continue with --resume"
        )
    return [result for result in results if result]
