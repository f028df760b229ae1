"""Planted captions: some samples are trained with another sample's caption, and the run alone knows which.

By them, a reader learns how many other captions are wrong (tools/inspection/temperatures/wrong_captions.py). Which
samples these are, and whose captions they show, follows from the seed, the ids and the stored captions, so nothing is
kept: ranks, resumed runs, forks and grown datasets agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..storage.mixed_rows import MixedRows
from ..storage.selection import Selection
from .augment import view_key
from .dataset import Dataset
from .mixture import Mixture
from .rng import compiled, uniform
from .row_records import RECORD

NEAR = 1024
"""A caption comes from one of the samples around: of a remote dataset, a window needs little more than its own."""
MAX_DRAWS = 64
"""A sample that has met only equal captions after these keeps its own."""
IDS_AT_ONCE = 1 << 16
_NOT_A_VIEW = np.uint64(1 << 33)
"""Replaces a view's number in the key; the epoch's is always 0."""
Ids = NDArray[np.int64]


class Planted(NamedTuple):
    """Samples that are trained with another sample's caption."""

    ids: Ids
    """int64 [k]."""
    donors: Ids
    """int64 [k]: whose caption each shows; of the same shard."""


class Planting:
    """Says which samples are planted."""

    def __init__(
        self, dataset: Dataset, seed: int, shares: float | Sequence[float], selection: Selection | None = None
    ) -> None:
        """shares: of the samples to plant, 0 … 1, or of those of each part of a mixture.

        selection: the samples that the run trains on, which alone give captions; it is read when it is first needed.
        """
        self._dataset, self._seed = dataset, np.uint64(seed)
        parts = dataset.parts if isinstance(dataset, Mixture) else (dataset,)
        self._ends = np.cumsum([part.n for part in parts])
        self._shares = np.broadcast_to(shares, len(parts))
        self._selection = None if isinstance(selection, MixedRows) else selection

    def of(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the places of planted samples among `ids`, int64 [b], and whose captions they show, int64 [k] each.

        Raises DatasetError naming a damaged sample, OSError.
        """
        share = self._shares[np.searchsorted(self._ends, ids, "right")]
        places = np.flatnonzero(_numbers(self._seed, ids, 0) < share)
        donors = self._donors(ids[places])
        return places[donors >= 0], donors[donors >= 0]

    def all(self) -> Planted:
        """Return all planted samples that the run trains on, by ascending id. Raises as `of`."""
        kept = self._selection.ids if self._selection else None
        found = []
        for start in range(0, self._dataset.n if kept is None else len(kept), IDS_AT_ONCE):
            stop = start + IDS_AT_ONCE
            ids = np.arange(start, min(stop, self._dataset.n)) if kept is None else kept[start:stop]
            if self._selection:
                ids = ids[self._selection.are_present(np.arange(start, start + len(ids)))]
            places, donors = self.of(ids)
            found.append(Planted(ids[places], donors))
        return Planted(*map(np.concatenate, zip(*found, strict=True)))

    def _donors(self, ids: Ids) -> Ids:
        """Return whose caption each of these shows, int64 [k]; -1 where all captions drawn equal its own."""
        found, left = np.full(len(ids), -1), np.arange(len(ids))
        low, count = self._around(ids)
        for draw in range(1, MAX_DRAWS + 1):
            if not len(left):
                break
            places = low[left] + (_numbers(self._seed, ids[left], draw) * count[left]).astype(np.int64)
            others = places if self._selection is None else self._selection.ids_at(places)
            fits = self._differ(ids[left], others)
            if self._selection is not None:
                fits &= self._selection.are_present(places)
            found[left[fits]] = others[fits]
            left = left[~fits]
        return found

    def _around(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the first of the samples around each, as a position among those selected, and their number."""
        shard, _ = self._dataset.locate(ids)
        kept = None if self._selection is None else self._selection.ids
        place, start, stop = ids, self._dataset.first_id[shard], self._dataset.first_id[shard + 1]
        if kept is not None:
            place, start, stop = (np.searchsorted(kept, each) for each in (place, start, stop))
        low = np.clip(place - NEAR // 2, start, np.maximum(start, stop - NEAR))
        return low, np.minimum(stop - low, NEAR)

    def _differ(self, ids: Ids, others: Ids) -> NDArray[np.bool_]:
        """Return where no caption of the one sample is a caption of the other, bool [k]."""
        with self._dataset.files.hold(np.concatenate([ids, others])):
            if self._dataset.index.captions_per_sample == 1:
                return np.asarray(self._checksums(ids) != self._checksums(others))
            pairs = zip(ids, others, strict=True)
            return np.array([self._captions(a).isdisjoint(self._captions(b)) for a, b in pairs], np.bool_)

    def _checksums(self, ids: Ids) -> NDArray[np.uint64]:
        shards, rows = self._dataset.locate(ids)
        records = np.empty(len(ids), RECORD)
        for number in np.unique(shards).tolist():
            records[shards == number] = self._dataset.shard(number).records(rows[shards == number])
        return records["tokens_checksum"]

    def _captions(self, sample_id: np.int64) -> set[bytes]:
        shard, row = (int(at[0]) for at in self._dataset.locate(np.array([sample_id])))
        return {tokens.tobytes() for tokens in self._dataset.shard(shard).tokens_of(row)}


@compiled
def _numbers(seed: np.uint64, ids: NDArray[np.int64], draw: int) -> NDArray[np.float64]:
    """Return a random number of each sample, float64 [b] in [0, 1): the `draw`-th."""
    found = np.empty(len(ids))
    for i in range(len(ids)):
        found[i] = uniform(view_key(seed, np.uint64(0), np.uint64(ids[i]), _NOT_A_VIEW), np.uint64(draw))
    return found
