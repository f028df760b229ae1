"""Orders of any geometry, for the tests of the sample order."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from thermopile.pipeline.order.order import Order

SOME, MANY = (settings(deadline=None, max_examples=examples) for examples in (30, 100))  # the first example compiles
SHARDS = st.sampled_from([1, 2, 3, 4, 8])
SEEDS = st.integers(0, 2**64 - 1)


@st.composite
def full_shuffles(draw: st.DrawFn) -> Order:
    """Orders of any geometry: short last blocks, last shards that lack blocks, steps longer than a block."""
    shards, blocks, step_rows = draw(SHARDS), draw(st.integers(1, 9)), draw(st.integers(16, 40))
    block_rows = draw(st.integers(-(-step_rows // blocks), 90))
    max_missing = min(shards * blocks - 1, blocks * block_rows - step_rows)
    samples = shards * blocks * block_rows - draw(st.integers(0, max_missing))
    return Order.create(samples, shards * step_rows, draw(SEEDS), shards, blocks)


@st.composite
def windowed(draw: st.DrawFn) -> Order:
    """Windowed orders, up to the widest window allowed and steps as long as a block."""
    shards, blocks, step_rows = draw(SHARDS), draw(st.integers(2, 48)), draw(st.integers(16, 24))
    block_rows = draw(st.integers(step_rows, 64))
    max_missing = min(shards * blocks - 1, blocks * block_rows - step_rows)
    samples = shards * blocks * block_rows - draw(st.integers(0, max_missing))
    window = draw(st.integers(1, min(blocks - 1, 2 * shards)))
    return Order.create(samples, shards * step_rows, draw(SEEDS), shards, blocks, window)


ORDERS = st.one_of(full_shuffles(), windowed())
EPOCHS = st.integers(0, 1_000)


def epoch_ids(order: Order, epoch: int) -> NDArray[np.int64]:
    """All batches of an epoch: int64 [steps, batch_size]."""
    return np.stack([order.batch_ids(epoch, step) for step in range(order.steps_per_epoch)])


def shard_sequence(order: Order, epoch: int, shard: int) -> NDArray[np.int64]:
    """The ids of one canonical shard in the order of their use."""
    return epoch_ids(order, epoch).reshape(order.steps_per_epoch, order.canonical_shards, -1)[:, shard].reshape(-1)
