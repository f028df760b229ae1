"""The interface of sources. A new source is one file, one entry in tools/convert_sources.py and one test."""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from pydantic import BaseModel

from ...storage.arrays import Int32s, Int64s
from ..dataset.index import Tars
from ..errors import BadSampleError, SourceError
from .caption_lengths import MEASURED_ON, CaptionLengths, measure
from .shards import in_runs, listings, shard_count

HUB = "hf://datasets/"
"""Begins the address of a data set on Hugging Face's hub."""
NEVER = 1 << 63
"""A time after all others, in nanoseconds since 1970."""
RUN = 1_000
"""Neighbouring samples taken together from a larger source to train a tokenizer."""
MAX_MARKS = 16_384
"""Each mark has one or two file names: a plan with all of them stays far below the read limit."""


class Sample(NamedTuple):
    """One sample from a source."""

    uri: str
    """Human-readable origin; valid UTF-8."""
    key: str
    """The source's own name for it."""
    picture: bytes | Image.Image
    """A file's undecoded bytes, or a generated picture."""
    caption: str | None = None
    group: str | None = None
    """Class or folder, if any."""
    further_captions: tuple[str, ...] = ()
    """Further captions besides `caption`."""
    altered: str | None = None
    """How the source altered the sample on purpose; None if unaltered."""
    tar_at: int | None = None
    """Offset of the picture in its tar, which is to keep it; None if the dataset stores it."""

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions, `caption` first; empty if there are none."""
        return () if self.caption is None else (self.caption, *self.further_captions)


_TYPES = {"uri": str, "key": str, "picture": bytes | Image.Image, "caption": str | None, "group": str | None,
          "further_captions": tuple}  # fmt: skip


class BadSample(NamedTuple):
    """A sample that cannot be used, as a line of errors.jsonl has it."""

    uri: str
    key: str
    reason: str


class Read(NamedTuple):
    """A sample that was read, or bytes of a source without one."""

    source_index: int
    sample: Sample | BadSample | None
    done: int = 1
    """What progress counts: samples, or bytes of a source that is read in order."""
    files: int = 0
    """Files that end here."""
    ignored: bool = False
    """Whether it has a caption that is not wanted."""
    unused: tuple[tuple[str, str, str], ...] = ()
    """Kind, name and cure of what stands beside the sample and is not used."""


class Unused(NamedTuple):
    """Things of one kind in a source that no sample uses."""

    number: int
    example: str
    cure: str = ""
    """How to use them; empty where they are no picture, caption or class."""


class Account(dict[str, Unused]):
    """Kind → what of it no sample uses, so that nothing of a source is dropped without a word."""

    def __str__(self) -> str:
        return "".join(
            f"; {each.number:,} × {kind}, such as {each.example}{f': {each.cure}' if each.cure else ''}"
            for kind, each in self.items()
        )

    def add(self, kind: str, example: str, cure: str = "", number: int = 1) -> None:
        """Count things of a kind; the first one is the example."""
        if number:
            known = self.get(kind, Unused(0, example, cure))
            self[kind] = known._replace(number=known.number + number)


class ClassGroups(NamedTuple):
    """The class of every sample, known without reading pictures."""

    names: tuple[str, ...]
    """The classes in the source's order, or sorted if it has none.

    The empty name stands for samples without a class; their Sample.group is None.
    """
    of_sample: Int32s
    """int32 [n]: index into names."""


Draw = Callable[[int, ClassGroups | None], Int64s]
"""Given the number of samples and their classes, returns the sorted places of those to convert."""
Selection = Int64s | Draw | None
"""Sorted source indices, int64 [samples], or for tars a rule; None for all."""


class Asked(NamedTuple):
    """What a conversion asks of its source."""

    seed: int = 0
    selection: Selection = None
    vocab_size: int = 0
    """Vocabulary size of the tokenizer to train; 0: chosen by the captions."""
    context_length: int = 0
    """Tokens per caption; 0: chosen by the captions."""
    tokenizer: Path | None = None
    """A tokenizer.json in place of a trained one."""


class Piece(NamedTuple):
    """A tar, or a part of one that begins and ends at samples."""

    tar: int
    start: int
    stop: int
    first: int
    """Place in the tar of the first sample."""


class Facts(BaseModel, frozen=True, extra="forbid"):
    """What the process that begins a conversion learns from the source, and decides for all; kept in the plan."""

    mode: Literal["images", "pairs"]
    vocab_size: int
    context_length: int
    groups: tuple[tuple[Piece, ...], ...] | None = None
    """The tars, or parts of tars, that are read in sequence and give a shard, rarely several; None for a listing."""
    counts: tuple[int, ...] | None = None
    """The samples of each tar, if some are selected."""
    selected: str | None = None
    """Which samples of all tars are selected: bits, packed, deflated and in base64."""


class Work(NamedTuple):
    """The samples of a shard in their order, int64 [k]."""

    indices: Int64s
    unchanged_since: int = NEVER
    """In nanoseconds since 1970. A picture file changed later is refused."""
    rows: Any = None
    """What the listing says of the samples, if the worker does not have the listing."""

    @property
    def max_rows(self) -> int:
        """Rows to reserve in a shard."""
        return len(self.indices)


class Source:
    """Samples to convert, sent to the worker processes: it must be compact and picklable.

    A source with random access implements `__len__`, `__getitem__`, `uri` and `describe`, mostly `key` too; source[i]
    raises BadSampleError if sample i cannot be read. A source that is read in order, as tars are, implements `extent`,
    `facts`, `training_captions`, `works`, `read`, `some` and `describe` instead. The rest is inherited.
    """

    mode: str
    """`images` or `pairs`; empty if only `facts` tells."""
    alters: bool = False
    """Whether the source alters samples on purpose. The samples table then has the column `altered`."""
    files_in_order: int = 0
    """Number of files that are read in order; progress then counts their bytes. 0: random access."""
    notes: tuple[str, ...] = ()
    """Facts about how the source is read, of which the command informs the user."""
    unused: Account = Account()
    """What the listing has that no sample uses; `read` tells what stands beside its samples."""
    index: Tars | None = None
    """The tars that keep the pictures; None if the dataset stores them."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Sample:
        return self.sample(index, NEVER)

    def uri(self, index: int) -> str:
        """Return the origin of sample i, even if it cannot be read."""
        raise NotImplementedError

    def key(self, index: int) -> str:
        """Return the source's own name for sample i; by default its number."""
        return str(index)

    def describe(self) -> dict[str, Any]:
        """Return dataset.json's record of the source, as JSON values.

        If the listing can change, this includes `listing`, its sha256, by which a resumed conversion notices changes of
        the source.
        """
        raise NotImplementedError

    def sample(self, index: int, unchanged_since: int) -> Sample:
        """Return sample i; raise SourceChangedError if its file was changed since, see Work.

        Checks what source[i] returns. Raises SourceError for another type than Sample has, BadSampleError for a pair
        without a caption.
        """
        from .listing import caption_texts

        sample: object = self[index]
        if not isinstance(sample, Sample):
            raise SourceError(f"sample {index} of the source is a {type(sample).__name__}; return a thermopile.Sample")
        for field, kind in _TYPES.items():
            if not isinstance(value := getattr(sample, field), kind):
                raise SourceError(
                    f"sample {index} of the source has a {field} of type {type(value).__name__}. Uri and key are text, "
                    "the picture is a file's bytes or a PIL image, caption and group are text or None"
                )
        if self.mode != "images":
            caption, *others = caption_texts(sample.captions)
            sample = sample._replace(caption=caption, further_captions=tuple(others))
        return sample._replace(group=sample.group or None)

    def groups(self) -> ClassGroups | None:
        """Return the samples' classes; None if the source has none.

        Reads every sample; override it where classes are known without the pictures.
        """
        from .listing import binary_arrays, groups_by_name

        samples = (each.sample for each in self.read(self.work(np.arange(len(self)))))
        names = ((isinstance(sample, Sample) and sample.group) or "" for sample in samples)
        return groups_by_name(binary_arrays(name.encode() for name in names))

    def captions(self, indices: Int64s) -> Iterable[str]:
        """Yield all captions of these samples, to train a tokenizer; none if the mode is `images`.

        Unreadable captions are skipped. Reads the samples; override it where captions are known without the pictures.
        """
        for each in self.read(self.work(indices)) if self.mode != "images" else ():
            yield from each.sample.captions if isinstance(each.sample, Sample) else ()

    def chunks(self) -> Int64s | None:
        """Return prefix sums, int64 [chunks + 1], of chunks whose samples are cheap only if read in sequence.

        None if random access costs the same.
        """
        return None

    def stored_bytes(self) -> int | None:
        """Return about how many bytes all pictures have in the source, so that shards are large; None if unknown."""
        return self._estimated_bytes

    @cached_property
    def _estimated_bytes(self) -> int | None:
        """An estimate by 200 samples, the same on every machine; None if there is one shard anyway."""
        if shard_count(len(self), None) == 1:
            return None
        places, sizes = np.linspace(0, len(self) - 1, 200).astype(np.int64), list[int]()
        for each in self.read(self.work(places)):
            with suppress(Exception):  # of a bad sample, or a damaged picture that was opened and not loaded
                picture = each.sample.picture  # type: ignore[union-attr]
                # The beginning of a generated one counts, compressed without loss.
                file = picture if isinstance(picture, bytes) else zlib.compress(picture.tobytes()[: 1 << 18], 1)
                sizes.append(len(file))
        return round(sum(sizes) * len(self) / len(sizes)) if sizes else None

    def marks(self) -> dict[str, str]:
        """Return marks that reveal changed files, by name. A conversion is resumed only if all marks are equal."""
        return {}

    def extent(self, selection: Selection) -> dict[str, Any]:
        """Return the plan's `samples`, `selected`, `selection` and `shards`, each None if it is not known yet."""
        assert selection is None or isinstance(selection, np.ndarray)
        selected, stored = len(self) if selection is None else len(selection), self.stored_bytes()
        return {
            "samples": len(self),
            "selected": selected,
            "selection": None if selection is None else hashlib.sha256(selection.astype("<i8").tobytes()).hexdigest(),
            "shards": shard_count(selected, stored and stored * selected // len(self)),
        }

    def lengths(self, asked: Asked) -> CaptionLengths | None:
        """Return vocabulary and context that suit the captions; None for images, or if only `facts` reads captions.

        Raises SourceError if no sample has a caption.
        """
        captions = self.captions(looked_at := in_runs(len(self), MEASURED_ON))
        found = measure(captions, asked.vocab_size or None, asked.context_length or None, asked.tokenizer)
        if found is None and self.mode != "images":
            first = next(iter(self.read(self.work(looked_at[:1])))).sample
            why = f"; the first: {first.reason}" if isinstance(first, BadSample) else ""
            raise SourceError(f"none of {len(looked_at):,} samples has a caption{why}{self.unused}")
        return found

    def facts(self, asked: Asked, tell: Callable[[str], None]) -> Facts:
        """Learn what a conversion must know. May be slow; `tell` says what is done. Raises SourceError."""
        return Facts(mode=self.mode, vocab_size=asked.vocab_size, context_length=asked.context_length)  # type: ignore[arg-type]

    def is_of(self, facts: Facts) -> bool:
        """Return whether these can be the source's facts; plan.json may be damaged."""
        return facts.mode == self.mode and facts.groups is None

    def training_captions(self, asked: Asked) -> Iterable[str]:
        """Yield captions to train a tokenizer: all, or those of evenly spaced runs, which are cheap to read."""
        places = in_runs(len(_selected(self, asked.selection)), 1_000_000, RUN)  # more change few merges
        return self.captions(asked.selection[places] if isinstance(asked.selection, np.ndarray) else places)

    def works(self, facts: Facts, asked: Asked, shards: int, unchanged_since: int) -> Iterator[Any]:
        """Yield the work of each shard, in order, for `read`; each has `max_rows`."""
        assert asked.selection is None or isinstance(asked.selection, np.ndarray)
        size = (self.stored_bytes() or 0) // len(self)
        for indices in listings(len(self), asked.selection, self.chunks(), asked.seed, shards, picture_bytes=size):
            yield self.work(indices, unchanged_since)

    def work(self, indices: Int64s, unchanged_since: int = NEVER) -> Work:
        """Return what a worker needs to read these samples."""
        return Work(indices, unchanged_since)

    def read(self, work: Any) -> Iterator[Read]:
        """Yield the samples of a Work in their order."""
        for index in work.indices.tolist():
            try:
                yield Read(index, self.sample(index, work.unchanged_since))
            except BadSampleError as error:
                yield Read(index, BadSample(self.uri(index), self.key(index), str(error)))

    def some(self, selection: Selection, seed: int, count: int, run: int) -> Iterator[Read]:
        """Yield about `count` samples drawn from the whole source, in runs of neighbours if others are slow to read."""
        places, run = _selected(self, selection), 1 if self.chunks() is None else run
        source = self if run == 1 else deepcopy(self)  # as workers get it, whose cache is soon freed
        runs = -(-len(places) // run)
        starts = np.random.default_rng(seed).choice(runs, min(count // run, runs), replace=False)
        for start in (starts * run).tolist():
            yield from source.read(source.work(np.array(places[start : start + run])))


def _selected(source: Source, selection: Selection) -> Sequence[int] | Int64s:
    return selection if isinstance(selection, np.ndarray) else range(len(source))


def marks_of(name_of: Callable[[int], str], versions: Sequence[object]) -> dict[str, str]:
    """Return Source.marks for files and their versions; above MAX_MARKS files, neighbours share a mark."""
    marks, together = {}, max(1, -(-len(versions) // MAX_MARKS))
    for first in range(0, len(versions), together):
        some = [*versions[first : first + together]]
        last = f" … {name_of(first + len(some) - 1)}" if len(some) > 1 else ""
        marks[name_of(first) + last] = hashlib.sha256(repr(some).encode()).hexdigest()[:16]
    return marks
