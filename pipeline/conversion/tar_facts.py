"""What the process that begins a conversion of tars decides for all: mode, vocabulary, context, groups, selection."""

import base64
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import SourceError
from ..sources.webdataset import Piece, Sampled, WebDatasetSource
from .caption_lengths import MEASURED_ON, in_runs, measure
from .plan import ConvertSettings, Draw, TarFacts, shard_count

FEW_TARS = 64
"""Fewer local tars are cut at samples, so that all cores of most machines have work. Their number does not count, since
a dataset is the same wherever it is converted."""


def facts_of(
    source: WebDatasetSource,
    settings: ConvertSettings,
    tokenizer: Path | None,
    draw: Draw | None,
    tell: Callable[[str], None],
) -> TarFacts:
    """Read a sample of the tars, and all of them if `draw` must know the samples' number and classes; `tell` says so.

    Raises SourceError if there is no sample, or if nothing is selected.
    """
    sampled = source.sampled(settings.seed, tell)
    vocab_size, context_length = source.lengths or (settings.vocab_size, settings.context_length)
    if source.mode == "pairs" and not (context_length and (vocab_size or tokenizer)):
        some = [sampled.captions[i] for i in in_runs(len(sampled.captions), MEASURED_ON)]
        if lengths := measure(some, vocab_size or None, context_length or None, tokenizer):
            tell(str(lengths))
            vocab_size, context_length = lengths.vocab_size, lengths.context_length
    counts, bits = _selected(source, draw, tell) if draw else (None, None)
    return TarFacts(
        mode="pairs" if source.mode == "pairs" else "images",
        vocab_size=vocab_size,
        context_length=context_length,
        groups=_groups(source, sampled, settings.seed),
        counts=counts,
        selected=bits,
    )


def _selected(source: WebDatasetSource, draw: Draw, tell: Callable[[str], None]) -> tuple[tuple[int, ...], str]:
    """Return the samples of each tar, and which of all samples are selected."""
    counts, groups = source.counted(tell)
    chosen = draw(int(counts.sum()), groups)
    if not len(chosen):
        raise SourceError("no samples are selected; there is nothing to convert")
    is_chosen = np.zeros(counts.sum(), np.bool_)
    is_chosen[chosen] = True
    packed = base64.b64encode(zlib.compress(np.packbits(is_chosen).tobytes())).decode()
    return tuple(counts.tolist()), packed


def _groups(source: WebDatasetSource, sampled: Sampled, seed: int) -> tuple[tuple[Piece, ...], ...]:
    """Permute the tars, or parts of few tars, and cut them into groups of about equal size."""
    sizes = source.sizes()
    total = int(sizes.sum())
    wanted = shard_count(total * sampled.samples // max(1, sampled.bytes), total)
    pieces = [Piece(tar, 0, int(size), 0) for tar, size in enumerate(sizes)]
    if len(pieces) < min(FEW_TARS, wanted) and not source.is_remote:
        pieces = [part for piece in pieces for part in _cut(source, piece, round(piece.stop * wanted / total))]
    order = np.random.default_rng(seed).permutation(len(pieces))
    lengths = np.array([pieces[i].stop - pieces[i].start for i in order])
    cuts = np.searchsorted(np.cumsum(lengths) - lengths / 2, np.arange(1, wanted) * total / wanted)
    bounds = np.unique([0, *cuts, len(pieces)])
    return tuple(tuple(pieces[i] for i in order[start:end]) for start, end in pairwise(bounds.tolist()))


def _cut(source: WebDatasetSource, piece: Piece, parts: int) -> list[Piece]:
    """Cut a tar at the samples nearest to equal parts of its bytes."""
    if parts < 2:
        return [piece]
    starts: NDArray[np.int64] = source.starts(piece.tar)
    firsts = np.searchsorted(starts, piece.stop * np.arange(1, parts) // parts)
    firsts = np.unique(firsts[(firsts > 0) & (firsts < len(starts))])
    bounds = [(0, 0), *((int(starts[first]), int(first)) for first in firsts), (piece.stop, len(starts))]
    return [Piece(piece.tar, start, stop, first) for (start, first), (stop, _) in pairwise(bounds)]
