"""Convert a source of samples to a dataset directory, atomically, on one machine or in parts on several.

The output depends on the source, the selection, the seed and the settings, but not on the number of workers, parts or
machines, or on interruptions. plan.py has what determines it, shard_pool.py or on_ray.py and shard_writer.py write the
shards, and partial.py keeps finished work and renames it at the end.
"""

import errno
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...storage.files import read_regular, sha256_of
from ...storage.place import AnyPlace, Place, place_of
from ..dataset.index import ERRORS_FILE, DatasetIndex, TokenizerInfo, read_index, seal_index
from ..dataset.tokenizer import MAX_FILE_BYTES, end_id_of, load_tokenizer, train_tokenizer, vocab_size_of
from ..errors import DatasetError, DatasetExistsError, SourceChangedError, SourceError
from ..sources import NEVER, Account, Asked, Selection, Source
from ..sources.caption_lengths import CONTEXTS
from .content import content_of
from .marker import Counts, PartResult, SampleCounts, read_bad_samples, stem
from .partial import Partial, claimed
from .plan import ConvertSettings, Plan
from .shard_pool import Pool, processes

__all__ = ["Conversion", "ConvertSettings", "PartSummary", "Summary", "convert", "lengths_of"]

FIRST_REASONS = 3
LEAST_SEEN = 1_000
"""Samples of tars to see before a share of them counts as too large."""
MAX_NAMED = 8
"""Maximum shards that an error names."""
OnProgress = Callable[[Counts], None]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Summary:
    """The result of a conversion."""

    path: Place
    index: DatasetIndex
    left_out: int
    reasons: list[tuple[str, int]]
    """Reasons for leaving out samples, most frequent first, with counts."""
    without_class: int | None
    """Samples without a class; None if the dataset was complete before this call."""
    seen: int
    """Samples processed by this call; the counts above include earlier, interrupted calls."""
    seconds: float


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


def _ignore(_: object) -> None:
    pass


def convert(
    source: Source,
    out: AnyPlace,
    settings: ConvertSettings | None = None,
    *,
    resume: bool = False,
    workers: int | None = None,
    on_progress: OnProgress = _ignore,
    tell: Tell = _ignore,
    **options: Any,
) -> Summary:
    """Write the dataset directory `out` atomically.

    settings: None for the defaults, with a vocabulary and a context that suit the captions. workers: processes; None
    for one per core. options: further fields of Conversion; the rest, and errors, as Conversion.run.
    """
    settings = settings or ConvertSettings(vocab_size=0, context_length=0).suited_to(source, tell)
    conversion = Conversion(source, out, settings, pool=processes(workers), **options)
    return conversion.run(resume=resume, on_progress=on_progress, tell=tell)


@dataclass(frozen=True)
class Conversion:
    """The conversion of a source to the dataset `out`, whole or in parts.

    A conversion that fails or is interrupted stays in `.OUT.partial`, to be resumed. Methods raise DatasetExistsError
    as Partial.refuse_existing does, if another process is converting to `out`, or if another plan was started there;
    SourceError if no sample is selected, or a sample, or too many samples, cannot be used; DatasetError for an unusable
    tokenizer, or if a worker dies or the disk is full or failing.
    """

    source: Source
    out: AnyPlace
    settings: ConvertSettings = field(default_factory=ConvertSettings)
    selection: Selection = None
    """Sorted source indices, int64 [samples], to convert instead of all; for tars, a rule that draws them."""
    tokenizer_from: Path | None = None
    """Use this tokenizer.json instead of training one, as test sets must; overrides settings.tokenizer."""
    lengths: tuple[int, int] | None = None
    """Vocabulary size and context length that go with it, see `lengths_of`."""
    overwrite: bool = False
    """Replace `out` if it is a dataset, once the new one is complete; start over after an interruption."""
    pool: Pool = field(default_factory=lambda: processes(None))

    def run(self, *, resume: bool = False, on_progress: OnProgress = _ignore, tell: Tell = _ignore) -> Summary:
        """Write the dataset atomically.

        resume: continue an interrupted conversion, if any; do nothing if `out` was made by the same plan. Calls
        on_progress a few times a second, and tell with what is done before.
        """
        started, seen, found = time.monotonic(), 0, None
        with self._claimed() as partial:
            if not (resume and not partial.in_progress and self._is_done()):
                partial.refuse_existing(overwrite=self.overwrite, resume=resume)
                if not (resume and partial.in_progress):
                    partial.clear()
                begun = self._begin(partial, tell)
                if not partial.is_whole:
                    seen, _ = begun.write(slice(None), on_progress)
                    found = begun.assemble()
                partial.publish()
            partial.clean_up()
        return self._summary(seen, started, found)

    def part(
        self,
        number: int,
        count: int,
        *,
        on_progress: OnProgress = _ignore,
        tell: Tell = _ignore,
        on_begun: Callable[[], None] | None = None,
    ) -> PartSummary:
        """Write the unfinished shards of part `number`, 1 … count; `finish` combines all parts. May be repeated.

        Processes on any machine that shares the place may convert other parts at the same time. on_begun: called before
        any of them goes on, once the plan exists. overwrite: `finish` may replace the dataset at `out`.
        """
        started = time.monotonic()
        if done_before := self._done_part(Partial(self.place)):  # parts of a finished one must not collide at the lock
            return done_before
        with self._claimed(shared=True) as partial:
            if done_before := self._done_part(partial):
                return done_before
            partial.refuse_existing(overwrite=self.overwrite, resume=True)
            begun = self._begin(partial, tell, on_begun)
            seen, samples = begun.write(slice(number - 1, None, count), on_progress)
            done = sum(result is not None for result in partial.results(begun.plan))
        return PartSummary(samples, seen, begun.plan.parts, done, time.monotonic() - started)

    def begin(self) -> None:
        """Make the plan that later parts join, unless it exists."""
        with self._claimed(shared=True) as partial:
            if not partial.in_progress and not self._is_done():
                partial.refuse_existing(overwrite=self.overwrite, resume=True)
                self._begin(partial, _ignore)

    def finish(self) -> Summary:
        """Combine the parts into a dataset, byte for byte as `run` writes it, and publish it. May be repeated.

        Reads every shard of a directory back. Raises DatasetError if parts are missing, damaged, or of another plan or
        version.
        """
        started, found = time.monotonic(), None
        with self._claimed() as partial:
            if partial.in_progress or not self._is_done():
                partial.refuse_existing(overwrite=self.overwrite, resume=True)
                if not partial.in_progress:
                    cure = "run the same command with --part 1/K … K/K"
                    raise DatasetError(f"no part of {self.place} has been converted; {cure}")
                begun = self._begin(partial, _ignore)
                if not partial.is_whole:
                    partial.remove_damaged(begun.plan)
                    found = begun.assemble()
                partial.publish()
            partial.clean_up()
        return self._summary(0, started, found)

    @cached_property
    def place(self) -> Place:
        return place_of(self.out)

    @cached_property
    def plan(self) -> Plan:
        """The plan, without what only the facts tell."""
        if self.asked.tokenizer and self.source.mode != "images":
            # Fail here rather than in every worker.
            load_tokenizer(self.asked.tokenizer, context_length=self.asked.context_length or CONTEXTS[-1])
        return Plan.of(self.source, self.settings, self.asked)

    @property
    def asked(self) -> Asked:
        tokenizer, settings = self.tokenizer_from or self.settings.tokenizer, self.settings
        return Asked(settings.seed, self.selection, settings.vocab_size, settings.context_length, tokenizer)

    @contextmanager
    def _claimed(self, *, shared: bool = False) -> Iterator[Partial]:
        if self.plan.selected == 0:
            raise SourceError("no samples are selected; there is nothing to convert")
        try:
            with claimed(self.place, shared=shared) as partial:
                yield partial
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            why = f"cannot write to {Partial(self.place).disk}: {os.strerror(error.errno)}"
            cure = "Free some space there, then continue with the same command and --resume"
            raise DatasetError(f"{why}. {cure}") from error
        except SourceChangedError as error:
            begun = Partial(self.place).begun
            raise SourceError(f"{error} without --resume: remove {begun} and convert again") from error

    def _begin(self, partial: Partial, tell: Tell, on_begun: Callable[[], None] | None = None) -> "_Begun":
        """Begin or join a conversion, with its tokenizer.

        One process learns the facts and trains the tokenizer, and the others wait for it; on_begun is called while they
        do. Raises as Partial.begin.
        """
        if partial.in_progress and on_begun is None:
            begun = _Begun(self, partial, partial.begin(self.plan))
            if not begun.lacks_tokenizer:
                return begun
        with partial.beginning(tell):
            plan = self.plan
            if not partial.in_progress:
                vocab_size, context_length = self.lengths or self.asked[2:4]
                asked = self.asked._replace(vocab_size=vocab_size, context_length=context_length)
                plan = plan.model_copy(update={"facts": self.source.facts(asked, tell)})
            begun = _Begun(self, partial, partial.begin(plan))
            if begun.lacks_tokenizer:
                partial.keep_tokenizer(begun.tokenizer())
            if on_begun:
                on_begun()
        return begun

    def _is_done(self) -> bool:
        try:
            return read_index(self.place).source.get("plan") == self.plan.digest()
        except DatasetError:
            return False

    def _done_part(self, partial: Partial) -> PartSummary | None:
        if partial.in_progress or not self._is_done():
            return None
        shards = len(read_index(self.place).shard_digests)
        return PartSummary(0, 0, shards, shards, 0)

    def _summary(self, seen: int, started: float, found: SampleCounts | None) -> Summary:
        bad = read_bad_samples(self.place / ERRORS_FILE)
        # Reasons that differ only in numbers count as one, with N for the number.
        reasons = Counter(re.sub(r"\d(?:[\d,.]*\d)?", "N", sample.reason) for sample in bad)
        return Summary(
            path=self.place,
            index=read_index(self.place),
            left_out=reasons.total(),
            reasons=reasons.most_common(FIRST_REASONS),
            without_class=found and found.without_class,
            seen=seen,
            seconds=time.monotonic() - started,
        )


def lengths_of(out: Place) -> tuple[int, int] | None:
    """Return vocabulary size and context length of a dataset, unfinished or not; None if it has no captions."""
    if (facts := Partial(out).facts) is not None:
        return facts.vocab_size, facts.context_length
    info = read_index(out).tokenizer
    return (info.vocab_size, info.context_length) if info else None


class _TooManyBadSamplesError(Exception):
    pass


class _Begun:
    """A conversion whose plan is in force. Raises DatasetExistsError if that is damaged."""

    def __init__(self, conversion: Conversion, partial: Partial, plan: Plan) -> None:
        if plan.facts is None or not conversion.source.is_of(plan.facts):
            raise DatasetExistsError("the conversion's plan.json is damaged; remove it, and start over")
        self.plan, self._facts = plan, plan.facts
        self._source, self._asked, self._pool = conversion.source, conversion.asked, conversion.pool
        chosen = {"vocab_size": self._facts.vocab_size, "context_length": self._facts.context_length}
        self._settings = conversion.settings.model_copy(update=chosen)
        self._partial = partial

    @property
    def lacks_tokenizer(self) -> bool:
        return self._facts.mode == "pairs" and not self._partial.tokenizer.is_file()

    def tokenizer(self) -> bytes:
        """Copy or train the tokenizer."""
        if self._asked.tokenizer is not None:
            return read_regular(self._asked.tokenizer, MAX_FILE_BYTES)
        captions = self._source.training_captions(self._asked)
        trained = train_tokenizer(captions, vocab_size=self._facts.vocab_size)
        return trained.to_str(pretty=True).encode()  # the tokenizer's own `save` does not report a full disk

    def write(self, own: slice, on_progress: OnProgress) -> tuple[int, int]:
        """Write the unfinished parts of the slice `own`; return the samples processed by this call, and in the slice.

        Raises SourceError if too many samples cannot be used, DatasetError as the pool does.
        """
        plan, settings = self.plan, self._settings
        files, results = self._partial.parts(plan), self._partial.results(plan)
        missing = {part for part in range(plan.parts)[own] if not results[part]}

        def watch(counts: Counts) -> None:
            on_progress(counts)
            total = max(counts.seen, LEAST_SEEN) if plan.selected is None else plan.selected
            if counts.left_out > settings.max_error_rate * total + 1e-9:
                raise _TooManyBadSamplesError

        # Count samples of other parts too, so that the parts of a broken source do not all run to their end.
        left_out = sum(result.found.left_out for result in results if result)
        done = _samples(results[own])
        if self._facts.groups is not None:  # progress counts the bytes of tars
            groups = zip(self._facts.groups[own], results[own], strict=True)
            done = sum(piece.stop - piece.start for group, result in groups if result for piece in group)
        counted = Counts(done, _samples(results), left_out)
        try:
            watch(counted)
            if missing:
                fails = settings.on_error == "fail"  # pictures may then be fixed between two attempts
                works = self._source.works(self._facts, self._asked, plan.parts, NEVER if fails else plan.made_at)
                parts = ((files[part], work) for part, work in enumerate(works) if part in missing)
                self._pool((self._source, settings, self._partial.tokenizer.absolute()), parts, counted, watch)
        except _TooManyBadSamplesError:
            raise self._too_many_bad_samples(plan.selected) from None
        now = _samples(self._partial.results(plan)[own])
        return now - _samples(results[own]), now

    def _too_many_bad_samples(self, total: int | None) -> SourceError:
        """Return the error to raise; saves the list of the samples left out so far in a file. total: None: unknown."""
        bad = self._partial.bad_samples(self.plan)
        first = "; ".join(f"{sample.uri!r}: {sample.reason}" for sample in bad[:FIRST_REASONS])
        of_all = f" of {total:,}" if total is not None else ""
        return SourceError(
            f"at least {len(bad):,}{of_all} samples cannot be used; --max-error-rate allows "
            f"{self._settings.max_error_rate:.3g} of them. The first: {first}. All are listed in "
            f"{self._partial.errors}. Fix the source and start over, or continue with --resume and a higher "
            "--max-error-rate"
        )

    def assemble(self) -> SampleCounts:
        """Complete the dataset from the finished shards; return the numbers of its samples.

        Raises DatasetError if a shard is not done, SourceError if too many samples were left out or none is usable.
        """
        plan, partial = self.plan, self._partial
        markers = partial.results(plan)
        if missing := [str(shard) for shard, result in enumerate(markers) if result is None]:
            more = f" and {len(missing) - MAX_NAMED} more" * (len(missing) > MAX_NAMED)
            raise DatasetError(
                f"{len(missing):,} of {len(markers):,} shards of {partial.out} are not done: "
                f"{', '.join(missing[:MAX_NAMED])}{more}. Run their parts again: with --part I/K, part I has the "
                "shards I - 1, I - 1 + K, …; without --part, continue with --resume"
            )
        results = [result for result in markers if result]
        samples = sum(result.rows for result in results)
        found = SampleCounts(*map(sum, zip(*(result.found for result in results), strict=True)))
        if found.left_out > self._settings.max_error_rate * (samples + found.left_out) + 1e-9:
            raise self._too_many_bad_samples(samples + found.left_out)
        shards = [shard for result in results for shard in result.shards]
        if not shards:
            first = partial.bad_samples(plan)[0]
            why = f"the first: {first.uri!r}: {first.reason}"
            raise SourceError(f"none of the {found.left_out:,} samples is usable; {why}")
        info, length = None, self._facts.context_length
        if self._facts.mode == "pairs":
            own = load_tokenizer(partial.tokenizer, context_length=length)
            info = TokenizerInfo(
                vocab_size=vocab_size_of(own), context_length=length, end_id=end_id_of(own), truncated=found.truncated
            )
        per_sample, tars = max(shard.captions_per_sample for shard in shards), self._source.index
        unused = Account(self._source.unused)
        for result in results:
            for kind, each in result.unused.items():
                unused.add(kind, each.example, each.cure, each.number)
        content = content_of(partial.row_records(plan, results), samples, pairs=info is not None, blank=found.blank)
        index = seal_index(
            {
                "n": samples,
                "mode": self._facts.mode,
                "captions_per_sample": per_sample,
                **({"captions": sum(shard.captions for shard in shards)} if per_sample > 1 else {}),
                "first_id": np.cumsum([0, *(shard.rows for shard in shards)]).tolist(),
                "shards": tuple(
                    stem(part, shard) for part, result in enumerate(results) for shard in range(len(result.shards))
                ),
                "image": self._settings.image.model_dump(),
                "tokenizer": info.model_dump() if info else None,
                "tokenizer_digest": sha256_of(partial.tokenizer) if info else None,
                "tars": tars and tars.model_dump(),
                "shard_digests": [shard.digests for shard in shards],
                "grown_from": None,
                "source": plan.source
                | {
                    "samples": samples + found.left_out if plan.samples is None else plan.samples,
                    "permutation_seed": plan.seed,
                    "plan": plan.digest(),
                    "content": content.model_dump(),
                    **({"captions_ignored": found.ignored} if found.ignored else {}),
                    **{name: count for name, count in found._asdict().items() if name.startswith("nearly_") and count},
                    **({"not_used": {kind: each._asdict() for kind, each in unused.items()}} if unused else {}),
                    **({"pictures_in_tars": found.in_tars} if tars else {}),
                },
            }
        )
        partial.assemble(plan, results, index)
        return found


def _samples(results: Sequence[PartResult | None]) -> int:
    return sum(result.rows + result.found.left_out for result in results if result)
