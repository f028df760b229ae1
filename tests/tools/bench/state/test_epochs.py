from itertools import takewhile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.pipeline.order import Order
from thermopile.tools.bench.state.epochs import expected_windows, ids_of
from thermopile.tools.bench.state.rows import random_ids


def test_the_windows_expected_hold_the_blocks_of_every_put_over_epochs():
    order = Order.for_memory(rows=600, samples=2000, batch_size=32)
    last_put = 3 * order.steps_per_epoch
    windows = list(takewhile(lambda window: window.first_step <= last_put, expected_windows(order)))
    assert [w.first_step for w in windows] == sorted(w.first_step for w in windows)
    for put in range(1, last_put + 1):
        blocks = ids_of(order, put - 1).numpy() // order.block_rows
        live = [window.blocks for window in windows if window.first_step <= put <= window.last_step]
        assert np.isin(blocks, np.concatenate(live)).all()


def test_the_step_after_an_epoch_is_the_first_of_the_next():
    order = Order.create(samples=1000, batch_size=32)
    assert ids_of(order, order.steps_per_epoch).tolist() == order.batch_ids(1, 0).tolist()


@given(st.integers(1, 100).flatmap(lambda count: st.tuples(st.just(count), st.integers(count, 10_000))), st.integers(0))
@settings(max_examples=50)
def test_random_ids_are_as_many_as_asked_for_and_no_id_comes_twice(sizes, seed):
    count, samples = sizes
    ids = random_ids(np.random.default_rng(seed), samples, count)
    assert (len(ids), ids.dtype) == (count, np.int64)
    assert len(set(ids.tolist())) == count
    assert ids.min() >= 0
    assert ids.max() < samples
