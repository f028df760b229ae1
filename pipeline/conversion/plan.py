"""What a conversion will write, known before it starts: which samples, in which order, in which shard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from ...files import sha256_of
from ..dataset_index import ImagePolicy
from ..sources import Source

MAX_SHARD_ROWS = 131_072
MIN_SHARD_ROWS, MIN_SHARD_BYTES = 1_024, 4 << 20
"""Every FFCV file is padded to whole pages of 2 MiB, header and end: smaller ones would be mostly padding."""
_PADDING_BYTES, _ROW_BYTES = 4 << 20, 256
"""Of a shard, at most; of a row's tokens and table, about."""
MANY_SHARDS = 128
"""Enough to keep many processes busy to the end, few enough to open at once."""
WINDOW_ROWS, WINDOW_BYTES = 2_048, 512 << 20
"""Samples of a source that is read in chunks are mixed over at least so many, or so much: a worker holds the chunks."""


class ConvertSettings(BaseModel, frozen=True, extra="forbid"):
    """What a conversion may be told."""

    seed: int = Field(default=0, ge=0)
    """Permutes the source's listing."""
    image: ImagePolicy = ImagePolicy()
    vocab_size: int = Field(default=1024, ge=300)
    """Size of the tokenizer trained on the captions: 256 bytes, 3 special tokens, the rest merges."""
    context_length: int = Field(default=32, ge=4)
    """Tokens per caption."""
    tokenizer: Path | None = None
    """A tokenizer.json to use instead of training one."""
    on_error: Literal["skip", "fail"] = "skip"
    """Whether a sample that cannot be used is left out and listed, or ends the conversion."""
    max_error_rate: float = Field(default=0.1, ge=0, le=1)
    """Share of the samples above which those that cannot be used end the conversion: the source is broken, then."""


class Plan(BaseModel, frozen=True, extra="forbid"):
    """All that decides the bytes of a dataset: a conversion is only gone on with under the same plan."""

    source: dict[str, Any]
    samples: int
    """In the source."""
    selected: int
    selection: str | None
    """sha256 of the selected source indices; None where all are."""
    seed: int
    image: ImagePolicy
    vocab_size: int | None
    """Of the tokenizer to be trained."""
    context_length: int | None
    tokenizer: str | None
    """sha256 of the tokenizer that was given."""
    shards: int

    @classmethod
    def of(
        cls, source: Source, settings: ConvertSettings, selection: NDArray[np.int64] | None, tokenizer: Path | None
    ) -> Plan:
        """The plan of a conversion; tokenizer is the file to be used instead of training one."""
        selected = len(source) if selection is None else len(selection)
        pairs = source.mode == "pairs"
        stored_bytes = source.stored_bytes()
        return cls(
            source=source.describe(),
            samples=len(source),
            selected=selected,
            selection=None if selection is None else hashlib.sha256(selection.astype("<i8").tobytes()).hexdigest(),
            seed=settings.seed,
            image=settings.image,
            vocab_size=settings.vocab_size if pairs and not tokenizer else None,
            context_length=settings.context_length if pairs else None,
            tokenizer=sha256_of(tokenizer) if pairs and tokenizer else None,
            shards=shard_count(selected, stored_bytes and stored_bytes * selected // len(source)),
        )

    def digest(self) -> str:
        """sha256, which dataset.json records: the same plan means the same dataset."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    def differences(self, begun: Plan) -> list[str]:
        """What differs from the plan that a conversion was begun with, for people."""
        now, then = _flat(self.model_dump(mode="json")), _flat(begun.model_dump(mode="json"))
        names = [name for name in now | then if now.get(name) != then.get(name)]
        return [f"{name} was {_short(then.get(name))} and is now {_short(now.get(name))}" for name in names]


def shard_count(samples: int, stored_bytes: int | None) -> int:
    """A power of two, so that the shards, all of one size, share out evenly over most numbers of processes."""
    wanted = max(1, samples // MIN_SHARD_ROWS)
    if stored_bytes is not None:
        wanted = max(1, min(wanted, stored_bytes // MIN_SHARD_BYTES))
    return max(min(MANY_SHARDS, 1 << (wanted.bit_length() - 1)), -(-samples // MAX_SHARD_ROWS))


def largest_bytes(samples: int, stored_bytes: int) -> int:
    """About how large the dataset gets at most: pictures that are reduced or encoded again mostly get smaller."""
    return stored_bytes + samples * _ROW_BYTES + shard_count(samples, stored_bytes) * _PADDING_BYTES


def cut_into_shards(
    selected: NDArray[np.int64],
    chunks: NDArray[np.int64] | None,
    seed: int,
    shards: int,
    *,
    picture_bytes: int = 0,
) -> list[NDArray[np.int64]]:
    """The source indices of every shard, in the order of their rows; `selected` is sorted.

    picture_bytes: of a picture in the source, on average.

    Data comes sorted by class, and blocks of state are ranges of ids, so the listing is permuted before it is cut.
    Where a source is read in chunks (prefix sums, as Source.chunks has them), whole chunks are permuted and cut into
    shards, and the samples are permuted within windows of whole chunks that hold at least WINDOW_ROWS together, or
    WINDOW_BYTES, so that each chunk is read about once: its samples stay near each other, but not in its order.
    """
    rng = np.random.default_rng(seed)
    cuts = np.array([shard * len(selected) // shards for shard in range(shards + 1)])
    if chunks is None:
        listing = rng.permutation(selected)
        return [listing[start:end] for start, end in pairwise(cuts.tolist())]
    chunk = np.searchsorted(chunks, selected, side="right") - 1
    turn = rng.permutation(len(chunks) - 1)[chunk]
    listing = selected[np.argsort(turn, kind="stable")]
    cuts = _at_ends_of_chunks(cuts, np.sort(turn))
    window = min(WINDOW_ROWS, WINDOW_BYTES // max(picture_bytes, 1))
    return [_mixed(listing[start:end], chunks, window, rng) for start, end in pairwise(cuts.tolist())]


def _at_ends_of_chunks(cuts: NDArray[np.int64], turn: NDArray[np.int64]) -> NDArray[np.int64]:
    """Move each cut to the nearest place where the chunk changes, unless that makes a shard too large, or empty."""
    ends = np.concatenate([[0], np.flatnonzero(np.diff(turn)) + 1, [len(turn)]])
    above = np.searchsorted(ends, cuts)
    below = np.maximum(above - 1, 0)
    moved = np.where(ends[above] - cuts < cuts - ends[below], ends[above], ends[below])
    sizes = np.diff(moved)
    return moved if sizes.min() > 0 and sizes.max() <= MAX_SHARD_ROWS else cuts


def _mixed(
    indices: NDArray[np.int64], chunks: NDArray[np.int64], window: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """One shard's samples, given chunk by chunk, permuted within windows of whole chunks and at least `window` rows."""
    chunk = np.searchsorted(chunks, indices, side="right")
    ends = [*(np.flatnonzero(np.diff(chunk)) + 1).tolist(), len(indices)]
    return np.concatenate([rng.permutation(indices[start:end]) for start, end in _windows(ends, window)])


def _windows(ends: list[int], window: int) -> Iterator[tuple[int, int]]:
    start = 0
    for end in ends:
        if end - start >= window or end == ends[-1]:
            yield start, end
            start = end


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _short(value: Any) -> str:
    """Enough of a value to recognise it: a digest's or a list's beginning."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:16]}…"
