"""Group labels of the samples: a column of the samples table, or derived from one."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ...pipeline.dataset import PLACE_IN_SHARD, Dataset
from ...trainer.errors import ConfigError
from ..state_blocks import ROWS_AT_ONCE

FOLDER = "folder"
"""Group by the uri up to its last slash."""


def check_columns(dataset: Dataset, columns: Sequence[str]) -> None:
    """Raise ConfigError for a column that samples cannot be grouped by."""
    known = [name for name in dataset.schema.names if name != PLACE_IN_SHARD] + [FOLDER]
    if unknown := [column for column in columns if column not in known]:
        raise ConfigError(f"samples cannot be grouped by {', '.join(map(repr, unknown))}: {dataset.path} has the "
                          f"columns {', '.join(known)}")  # fmt: skip


class Labels:
    """Yields the labels of all samples of a dataset, ordered by id, piece by piece.

    column: one of the samples table, or `folder`.
    """

    def __init__(self, dataset: Dataset, column: str) -> None:
        self.column = column
        self._source = "uri" if column == FOLDER else column
        self._tables = dataset.tables([self._source], ROWS_AT_ONCE)
        self._held = pa.chunked_array([pa.array([], pa.string())])

    def take(self, count: int) -> pa.Array:
        """Return the next `count` labels, strings; null for samples without one."""
        while len(self._held) < count:
            found = next(self._tables)[self._source].cast(pa.string())
            self._held = pa.chunked_array([*self._held.chunks, *found.chunks])
        taken, self._held = self._held.slice(0, count).combine_chunks(), self._held.slice(count)
        if self.column == FOLDER:
            return pc.replace_substring_regex(taken, "/?[^/]*$", "")
        return taken
