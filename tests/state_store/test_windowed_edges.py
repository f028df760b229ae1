"""Rows under a memory budget, at the edges of what a rank holds and of what its windows say."""

from types import SimpleNamespace

import numpy as np
import pytest

from thermopile.state_store import BackgroundError, StateStore

SAMPLES, BLOCK_ROWS, ROW_BYTES = 240, 20, 32
FIELDS = {f"field_{i}": i / 2 for i in range(6)}


@pytest.fixture
def create(tmp_path):
    """Create a store whose memory holds this many blocks, for these samples."""

    def make(budget_blocks, owned=range(SAMPLES)):
        return StateStore.create(
            tmp_path / "state", SAMPLES, FIELDS, block_rows=BLOCK_ROWS, dataset_fingerprint="edges", owned=owned,
            memory_budget=budget_blocks * BLOCK_ROWS * ROW_BYTES,
        )  # fmt: skip

    return make


def window(first_step, last_step, *blocks):
    return SimpleNamespace(first_step=first_step, last_step=last_step, blocks=np.array(blocks))


@pytest.mark.parametrize(
    ("owned", "strange", "held"),
    [(range(120), 6, "0 … 5"), (range(120, 240), 5, "6 … 11"), (range(120, 240), 12, "6 … 11")],
)
def test_the_block_next_to_a_rank_s_own_is_refused(create, owned, strange, held):
    store = create(3, owned)
    store.expect([window(1, 9, strange)])
    store._rows.blocks._thread.drain()
    with pytest.raises(BackgroundError, match=f"block {strange}, but this process holds the blocks {held}"):
        store.take(np.array([owned.start]))
    store.close()
