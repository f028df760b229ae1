"""The blocks of samples that a cache keeps and drops as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..order.order import Order, Selected
from .plan import Ids

ROWS_WITHOUT_ORDER = 1024


@dataclass(frozen=True)
class Blocks:
    """Ranges of ids, block k from starts[k] to starts[k + 1]; of a selection only its samples.

    The others, which the order never reads, are in blocks that follow, one after each of these.
    """

    starts: Ids
    """int64 [blocks + 1], from 0 to the dataset's number of samples."""
    order: Order | Selected | None = None

    @classmethod
    def without_order(cls, samples: int) -> Blocks:
        """Return small blocks, for readers in any order."""
        return cls(np.append(np.arange(0, samples, ROWS_WITHOUT_ORDER), samples))

    @classmethod
    def of(cls, order: Order | Selected) -> Blocks:
        positions = order.order if isinstance(order, Selected) else order
        firsts = np.arange(0, positions.samples, positions.block_rows)
        samples = order.samples
        if isinstance(order, Selected):
            firsts = np.array(order.selection.ids_at(firsts))
            firsts[0] = 0
        return cls(np.append(firsts, samples), order)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of_ids(self, ids: Ids) -> Ids:
        """Return the block of each id, int64 [b]."""
        blocks = np.searchsorted(self.starts, ids, side="right") - 1
        if isinstance(self.order, Selected):
            blocks += len(self) * ~self.order.selection.are_trained(ids)
        return blocks

    def ids(self, block: int) -> Ids:
        """Return a block's ids to read, int64 [k], ascending."""
        if isinstance(self.order, Selected):
            order, selection = self.order.order, self.order.selection
            first = block * order.block_rows
            positions = np.arange(first, min(first + order.block_rows, order.samples))
            return np.array(selection.ids_at(positions[selection.are_present(positions)]))
        return np.arange(self.starts[block], self.starts[block + 1])
