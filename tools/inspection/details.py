"""All that is known of a few samples: their rows of the state and of the samples table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...state_store import StateReader
from .run import Inspection


@dataclass(frozen=True)
class Details:
    """One sample at the inspected snapshot."""

    sample_id: int
    state: dict[str, float | int]
    """By column of the state: the fields, `visits`, `last_step`; empty where there is no snapshot yet."""
    table: dict[str, Any]
    """By column of the samples table: uri, key, caption, group, …; empty where the dataset is gone."""


def read_details(inspection: Inspection, sample_ids: Iterable[int]) -> dict[int, Details]:
    """Read samples by id, 0 … n - 1; by id. Raises DatasetError, DamagedChunkError."""
    ids = sorted(set(sample_ids))
    rows = inspection.dataset.rows(ids) if inspection.dataset else [{} for _ in ids]
    state = read_rows(inspection.reader, ids) if inspection.reader else {}
    return {id: Details(id, state.get(id, {}), row) for id, row in zip(ids, rows, strict=True)}


def read_rows(reader: StateReader, sample_ids: list[int]) -> dict[int, dict[str, float | int]]:
    """Read rows of the state by id, ascending, reading each of their blocks once."""
    ids, found = np.array(sample_ids, np.int64), {}
    for block in np.unique(ids // reader.block_rows).tolist():
        start = block * reader.block_rows
        stop = min(start + reader.block_rows, reader.samples)
        inside = ids[(ids >= start) & (ids < stop)]
        columns = reader.rows(start, stop)
        for sample_id in inside.tolist():
            found[sample_id] = {name: values[sample_id - start].item() for name, values in columns.items()}
    return found
