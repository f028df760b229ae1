"""A snapshot's temperatures in few numbers, for trackers."""

from itertools import repeat
from typing import Any

import numpy as np

from ...pipeline.opening import Dataset
from ...state_store import StateReader

EDGES = np.geomspace(1e-3, 10, 257)
"""Edges of the bins of every histogram, 4 % apart. Values outside are counted in the first or the last bin."""


def summary(reader: StateReader, dataset: Dataset) -> dict[str, Any]:
    """Return what the visited samples' temperatures say; empty for a run without a temperature per sample.

    `histograms`: for each side, such as image/tau, counts int64 [bins] and edges float64 [bins + 1], from the first
    bin with samples to the last. And numbers image/tau_of_classes/16: the mean tau of a class, over the classes of 16
    to 31 visited samples; not for a dataset in an object store, where the classes would have to be fetched again.
    Reads a block at a time. Raises StateStoreError, DatasetError, OSError.
    """
    import pandas as pd  # late: only a run with trackers needs it

    sides, samples = [name for name in reader.fields if name.endswith("/tau")], reader.samples
    if not sides:
        return {}
    counts = {side: np.zeros(len(EDGES) - 1, np.int64) for side in sides}
    pieces = [pd.DataFrame(columns=[*sides, "size"], dtype=float)]  # sums over classes: of many blocks, of some more
    tables = repeat(None) if dataset.is_remote else dataset.tables(["group"], reader.block_rows)
    for start, table in zip(range(0, samples, reader.block_rows), tables, strict=False):
        rows = reader.rows(start, min(start + reader.block_rows, samples), [*sides, "visits"])
        seen = rows.pop("visits") > 0
        for side in sides:
            counts[side] += np.histogram(rows[side][seen].clip(EDGES[0], EDGES[-1]), EDGES)[0]
        if table is not None:
            frame = pd.DataFrame(rows | {"size": seen}, dtype=float)[seen]
            pieces.append(frame.groupby(table["group"].to_pandas()[seen]).sum())
            if sum(map(len, pieces[1:])) > len(pieces[0]):
                pieces = [pd.concat(pieces).groupby(level=0).sum()]
    sums = pd.concat(pieces).groupby(level=0).sum()
    means = sums[sides].div(sums["size"], axis=0).groupby(2 ** np.log2(sums["size"]).astype(int)).mean()
    numbers = {f"{side}_of_classes/{size}": mean for side in sides for size, mean in means[side].items()}
    return numbers | {"histograms": {side: _trimmed(counts[side]) for side in sides if counts[side].any()}}


def _trimmed(counts: Any) -> tuple[Any, Any]:
    first, *_, last = np.flatnonzero(counts)[[0, -1]]
    return counts[first : last + 1], EDGES[first : last + 2]
