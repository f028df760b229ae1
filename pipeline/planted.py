"""Planted captions: some samples are trained with another sample's caption, and the run alone knows which.

By them, a reader learns how many other captions are wrong (tools/inspection/temperatures/misfits.py). Which
samples these are, and whose captions they show, follows from the seed, the ids and the stored captions, so nothing is
kept: ranks, resumed runs, forks and grown datasets agree.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..storage.arrays import Bools, Float64s, Int64s
from ..storage.mixed_rows import MixedRows
from ..storage.selection import Selection
from .opening import Dataset, Mixture
from .views.draws import draw_numbers

NEAR, MAX_DRAWS = 1024, 64
"""A caption is of one of so many samples around, so that windows of a remote dataset need little more than their own; a
sample that has drawn only equal ones so many times keeps its own."""
_NOT_A_VIEW = np.uint64(1 << 33)
"""Replaces a view's number in the key, whose epoch is 0."""


class Planting:
    """Says which samples are planted, and whose captions they show. Methods raise DatasetError and OSError."""

    def __init__(
        self, dataset: Dataset, seed: int, shares: float | Sequence[float], selection: Selection | None = None
    ) -> None:
        """shares: of the samples to plant, 0 … 1, or of those of each part of a mixture. selection: the samples that
        the run trains on, which alone give captions; read when it is first needed."""
        self._dataset, self._seed = dataset, np.uint64(seed)
        parts = dataset.parts if isinstance(dataset, Mixture) else (dataset,)
        self._ends, self._shares = np.cumsum([part.n for part in parts]), np.broadcast_to(shares, len(parts))
        self._selection = None if isinstance(selection, MixedRows) else selection

    def of(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return the places of planted samples among `ids`, int64 [b], and whose captions they show, int64 [k] each."""
        share = self._shares[np.searchsorted(self._ends, ids, "right")]
        places = np.flatnonzero(self._numbers(ids, 0) < share)
        donors, left, draw = np.full(len(places), -1), np.arange(len(places)), 0
        first_id = self._dataset.first_id
        while len(left) and (draw := draw + 1) <= MAX_DRAWS:
            own = ids[places[left]]
            shards, _ = self._dataset.locate(own)
            low = np.clip(own - NEAR // 2, first_id[shards], np.maximum(first_id[shards], first_id[shards + 1] - NEAR))
            count = np.minimum(first_id[shards + 1] - low, NEAR)
            others = low + (self._numbers(own, draw) * count).astype(np.int64)
            fits = self._gives(others)
            with self._dataset.files.hold(np.concatenate([own, others])):
                for number in np.unique(shards).tolist():
                    at = np.flatnonzero(shards == number)
                    rows, of_others = (each[at] - first_id[number] for each in (own, others))
                    fits[at] &= self._dataset.shard(number).captions_differ(rows, of_others)
            donors[left[fits]] = others[fits]
            left = left[~fits]
        return places[donors >= 0], donors[donors >= 0]

    def all(self) -> tuple[Int64s, Int64s]:
        """Return the ids of all planted samples that the run trains on, ascending, and whose captions they show."""
        found = []
        for shard in pairwise(self._dataset.first_id.tolist()):
            ids = np.arange(*shard)
            places, donors = self.of(ids := ids[self._gives(ids)])
            found.append(np.stack([ids[places], donors]))
        ids, donors = np.concatenate(found, axis=1)
        return ids, donors

    def _gives(self, ids: Int64s) -> Bools:
        """Return which samples the run trains on, bool [k]."""
        return self._selection.are_trained(ids) if self._selection else np.ones(len(ids), np.bool_)

    def _numbers(self, ids: Int64s, draw: int) -> Float64s:
        """Return the `draw`-th random number of each sample, float64 [b] in [0, 1)."""
        return draw_numbers(self._seed, np.uint64(0), ids, _NOT_A_VIEW, draw)
