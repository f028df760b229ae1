"""The plan of a conversion, made before it starts: which samples go into which shard, in which order."""

import base64
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from ...storage.files import sha256_of
from ..dataset_index import ImagePolicy
from ..sources import Groups, Source
from ..sources.webdataset import WINDOW_BYTES, WINDOW_ROWS, Piece, WebDatasetSource

MAX_SHARD_ROWS = 131_072
MIN_SHARD_ROWS, MIN_SHARD_BYTES = 1_024, 4 << 20
"""FFCV pads header and end to whole pages of 2 MiB: smaller files would be mostly padding."""
MIN_SAMPLE_BYTES = 1024
"""What a picture takes in a tar at least, with its header."""
_CHOSEN = ("vocab_size", "context_length", "tokenizer")
MANY_SHARDS = 128
"""Enough shards to keep many processes busy, few enough to open at once."""
AnySource = Source | WebDatasetSource
Draw = Callable[[int, Groups | None], NDArray[np.int64]]
"""Given the number of samples and their classes, returns the sorted places of those to convert."""
Selection = NDArray[np.int64] | Draw | None
"""Sorted source indices, int64 [samples], or for tars a rule; None for all."""


class ConvertSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of a conversion."""

    seed: int = Field(default=0, ge=0)
    """Seed of the permutation of the source's listing."""
    image: ImagePolicy = ImagePolicy()
    vocab_size: Annotated[int, Field(ge=300)] | Literal[0] = 1024
    """Vocabulary size of the tokenizer trained on the captions: 256 bytes, 3 special tokens, the rest merges. 0: chosen
    by the captions, for tars."""
    context_length: Annotated[int, Field(ge=4)] | Literal[0] = 32
    """Tokens per caption; 0: likewise."""
    tokenizer: Path | None = None
    """A tokenizer.json to use instead of training one."""
    on_error: Literal["skip", "fail"] = "skip"
    """Whether a bad sample is left out and listed, or fails the conversion."""
    max_error_rate: float = Field(default=0.1, ge=0, le=1)
    """A larger share of bad samples fails the conversion, since the source must be broken."""


class TarFacts(BaseModel, frozen=True, extra="forbid"):
    """What the process that begins a conversion of tars learns from a sample of them, and decides for all."""

    mode: Literal["images", "pairs"]
    vocab_size: int
    context_length: int
    groups: tuple[tuple[Piece, ...], ...]
    """The tars, or parts of tars, that are read in sequence and give a shard, rarely several."""
    counts: tuple[int, ...] | None
    """The samples of each tar, if some are selected."""
    selected: str | None
    """Which samples of all are selected: bits, packed, deflated and in base64."""

    def is_of(self, sizes: Sequence[int]) -> bool:
        """Return whether the groups hold every byte of tars of these sizes once; plan.json may be damaged."""
        ends = dict.fromkeys(range(len(sizes)), 0)
        for piece in sorted(piece for group in self.groups for piece in group):
            if piece.start != ends.get(piece.tar):
                return False
            ends[piece.tar] = piece.stop
        return [*ends.values()] == [*sizes] and (self.counts is None or len(self.counts) == len(sizes))

    def selected_of(self, group: Sequence[Piece]) -> list[NDArray[np.bool_]] | None:
        """Return for each piece's tar which of its samples are selected, bool [samples]; None for all."""
        if self.selected is None or self.counts is None:
            return None
        first = np.cumsum([0, *self.counts])
        bits = np.unpackbits(np.frombuffer(self._packed, np.uint8)).view(np.bool_)
        return [bits[first[piece.tar] : first[piece.tar + 1]] for piece in group]

    @cached_property
    def _packed(self) -> bytes:
        return zlib.decompressobj().decompress(base64.b64decode(self.selected or ""), sum(self.counts or ()) // 8 + 1)


class Plan(BaseModel, frozen=True, extra="forbid"):
    """Everything that determines a dataset's bytes: a conversion resumes only under the same plan."""

    source: dict[str, Any]
    samples: int | None
    """Samples in the source; None for tars, which are not counted before they are read."""
    selected: int | None
    selection: str | None
    """sha256 of the selected source indices, or for tars the name of their rule; None if all are selected."""
    seed: int
    image: ImagePolicy
    vocab_size: int | None
    """Vocabulary size of the tokenizer to train, or for tars the one asked for."""
    context_length: int | None
    tokenizer: str | None
    """sha256 of a given tokenizer."""
    shards: int | None
    """None for tars, whose groups are in `tars`."""
    tars: TarFacts | None = None
    """Not in the digest, since everything above determines it."""
    marks: dict[str, str]
    """Source.marks. Like made_at, not in the digest: copying the files does not change the dataset."""
    made_at: int
    """In nanoseconds since 1970. Ties shards to this plan, not to an equal one made later, perhaps of other files."""

    @classmethod
    def of(cls, source: AnySource, settings: ConvertSettings, selection: Selection, tokenizer: Path | None) -> Self:
        """Return the plan of a conversion; tokenizer: a file to use instead of training a tokenizer.

        Of tars it lacks what `TarFacts` holds.
        """
        pairs = isinstance(source, WebDatasetSource) or source.mode == "pairs"  # tars tell later
        return cls(
            source=source.describe(),
            **(_of_tars(selection) if isinstance(source, WebDatasetSource) else _of_listing(source, selection)),
            seed=settings.seed,
            image=settings.image,
            vocab_size=(settings.vocab_size or None) if pairs and not tokenizer else None,
            context_length=(settings.context_length or None) if pairs else None,
            tokenizer=sha256_of(tokenizer) if pairs and tokenizer else None,
            marks=source.marks(),
            made_at=time.time_ns(),
        )

    @property
    def parts(self) -> int:
        """Number of shards, or of groups of tars, each with a marker of its own."""
        return self.shards if self.shards is not None else len(self.tars.groups) if self.tars else 0

    def digest(self) -> str:
        """Return the sha256 that dataset.json records: equal plans give equal datasets."""
        return hashlib.sha256(json.dumps(self._settings(), sort_keys=True).encode()).hexdigest()

    def _settings(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"marks", "made_at", "tars"})

    def differences(self, begun: Self) -> list[str]:
        """Return readable differences from the plan that a conversion was started with; at most three for files."""
        now, then = _flat(self._settings()), _flat(begun._settings())
        if begun.tars:  # what is not asked for is taken from the plan
            then |= {"vocab_size": begun.tars.vocab_size, "context_length": begun.tars.context_length}
            now |= {name: then[name] for name in _CHOSEN if now[name] is None}
        names = [name for name in now | then if now.get(name) != then.get(name)]
        found = [f"{name} was {_short(then.get(name))} and is now {_short(now.get(name))}" for name in names]
        files = sorted({name for name, _ in self.marks.items() ^ begun.marks.items()})
        return found + [f"{file} has changed" for file in files[:3]]


def _of_listing(source: Source, selection: Selection) -> dict[str, Any]:
    assert selection is None or isinstance(selection, np.ndarray)
    selected, stored = len(source) if selection is None else len(selection), source.stored_bytes()
    return {
        "samples": len(source),
        "selected": selected,
        "selection": None if selection is None else hashlib.sha256(selection.astype("<i8").tobytes()).hexdigest(),
        "shards": shard_count(selected, stored and stored * selected // len(source)),
    }


def _of_tars(selection: Selection) -> dict[str, Any]:
    return {"samples": None, "selected": None, "selection": selection and str(selection), "shards": None}


def shard_count(samples: int, stored_bytes: int | None) -> int:
    """Return a power of two, so that equal shards divide evenly among most numbers of processes."""
    wanted = max(1, samples // MIN_SHARD_ROWS)
    if stored_bytes is not None:
        wanted = max(1, min(wanted, stored_bytes // MIN_SHARD_BYTES))
    return max(min(MANY_SHARDS, 1 << (wanted.bit_length() - 1)), -(-samples // MAX_SHARD_ROWS))


class Listings:
    """The source indices of every shard in row order: iterates, once, over int64 [rows of the shard].

    Sources are often sorted by class, and blocks of state are ranges of ids, so the listing is permuted before it is
    cut. If a source is read in chunks (see Source.chunks), whole chunks are permuted and cut into shards, and samples
    are permuted within windows of whole chunks that hold at least WINDOW_ROWS or WINDOW_BYTES. Each chunk is then read
    about once: its samples stay close to each other, but not in order.

    A source in chunks needs a shard's memory, others four bytes a sample.
    """

    def __init__(
        self,
        samples: int,
        selection: NDArray[np.int64] | None,
        chunks: NDArray[np.int64] | None,
        seed: int,
        shards: int,
        *,
        picture_bytes: int = 0,
    ) -> None:
        """Cut the listing.

        samples: number of samples in the source. selection: sorted indices to convert; None for all.
        chunks: prefix sums of the chunks' sizes. picture_bytes: average size of a picture in the source.
        """
        self._rng, self._selection = np.random.default_rng(seed), selection
        self._count = samples if selection is None else len(selection)
        self._cuts = np.array([shard * self._count // shards for shard in range(shards + 1)])
        self._window = min(WINDOW_ROWS, WINDOW_BYTES // max(picture_bytes, 1))
        self._is_chunked = chunks is not None
        if chunks is not None:
            # Places of the chunks' first samples among the selected ones.
            first = chunks if selection is None else np.searchsorted(selection, chunks)
            order = np.argsort(self._rng.permutation(len(chunks) - 1))
            order = order[np.diff(first)[order] > 0]
            self._ends = np.cumsum([0, *np.diff(first)[order]])  # in the permuted listing
            self._shift = first[order] - self._ends[:-1]
            self._cuts = _at_ends_of_chunks(self._cuts, self._ends)

    @property
    def sizes(self) -> list[int]:
        """Number of samples of every shard."""
        return [int(size) for size in np.diff(self._cuts)]

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return self._of_chunks() if self._is_chunked else self._permuted()

    def _permuted(self) -> Iterator[NDArray[np.int64]]:
        places = np.arange(self._count, dtype=np.uint32 if self._count <= 1 << 32 else np.int64)
        self._rng.shuffle(places)
        for start, end in pairwise(self._cuts.tolist()):
            yield self._selected(places[start:end].astype(np.int64))

    def _of_chunks(self) -> Iterator[NDArray[np.int64]]:
        ends = self._ends
        for start, end in pairwise(self._cuts.tolist()):
            held, mixed = [], []
            begun, ended = int(np.searchsorted(ends, start, side="right")) - 1, int(np.searchsorted(ends, end))
            for place in range(begun, ended):
                piece = np.arange(max(start, ends[place]), min(end, ends[place + 1])) + self._shift[place]
                held.append(self._selected(piece))
                if sum(map(len, held)) >= self._window or place == ended - 1:
                    mixed.append(self._rng.permutation(np.concatenate(held)))
                    held = []
            yield np.concatenate(mixed)

    def _selected(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return places if self._selection is None else self._selection[places]


def _at_ends_of_chunks(cuts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Move each cut to the nearest chunk boundary, unless that makes a shard empty or too large."""
    above = np.searchsorted(ends, cuts)
    below = np.maximum(above - 1, 0)
    moved = np.where(ends[above] - cuts < cuts - ends[below], ends[above], ends[below])
    sizes = np.diff(moved)
    return moved if sizes.min() > 0 and sizes.max() <= MAX_SHARD_ROWS else cuts


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _short(value: Any) -> str:
    """Shorten a value, such as a digest or a list, to its beginning."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:16]}…"
