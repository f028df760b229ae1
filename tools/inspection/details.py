"""Read everything about a few samples: their rows of the state and of the samples table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...pipeline.dataset import PLACE_IN_SHARD
from ...state_store import StateReader
from ..state_blocks import Rows
from .run import Inspection


@dataclass(frozen=True)
class Details:
    """One sample at the inspected snapshot."""

    sample_id: int
    state: dict[str, float | int]
    """Column of the state -> value: the fields, `visits`, `last_step`; empty before the first snapshot."""
    table: dict[str, Any]
    """Column of the samples table -> value: uri, key, caption, group, …; empty without the dataset."""


def read_details(inspection: Inspection, sample_ids: Iterable[int]) -> dict[int, Details]:
    """Return details by sample id, 0 … n - 1. Raises DatasetError, DamagedChunkError, SnapshotNotFoundError."""
    ids = sorted(set(sample_ids))
    rows = inspection.dataset.rows(ids) if inspection.dataset else [{} for _ in ids]
    for row in rows:
        row.pop(PLACE_IN_SHARD, None)
    state = read_rows(inspection.reader, ids) if inspection.reader else {}
    return {id: Details(id, state.get(id, {}), row) for id, row in zip(ids, rows, strict=True)}


def read_rows(reader: StateReader, sample_ids: Sequence[int]) -> dict[int, dict[str, float | int]]:
    """Return rows of the state: id -> column -> value."""
    columns = read_ids(reader, np.array(sample_ids, np.int64), reader.columns)
    return {
        sample_id: {name: values[place].item() for name, values in columns.items()}
        for place, sample_id in enumerate(sample_ids)
    }


def read_ids(reader: StateReader, sample_ids: NDArray[np.int64], columns: Sequence[str]) -> Rows:
    """Read columns of the state for ids, int64 [b], in the given order; each block is read once."""
    order = np.argsort(sample_ids, kind="stable")
    blocks = sample_ids[order] // reader.block_rows
    found: Rows = {
        name: np.empty(len(order), np.float32 if name in reader.fields else np.uint32) for name in columns
    }  # fmt: skip
    for places in np.split(order, np.flatnonzero(np.diff(blocks, prepend=-1)))[1:]:
        ids = sample_ids[places]
        for name, values in reader.rows(int(ids[0]), int(ids[-1]) + 1, columns).items():
            found[name][places] = values[ids - ids[0]]
    return found
