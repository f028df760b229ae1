import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermopile.state_store.rows import ResidentRows
from thermopile.state_store.schema import Schema

SAMPLES, BLOCK_ROWS = 50, 8


def make_rows(fields=3, samples=SAMPLES):
    return ResidentRows(Schema({f"field_{i}": i / 2 for i in range(fields)}), samples, BLOCK_ROWS)


def gathered(rows, ids):
    ids = np.array(ids, dtype=np.int64)
    values = np.empty((len(rows.schema.names), len(ids)), dtype=np.float32)
    visits = np.empty(len(ids), dtype=np.int32)
    rows.gather(ids, values, visits)
    return values, visits


distinct_ids = st.lists(st.integers(0, SAMPLES - 1), unique=True)
some_floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize("fields", [1, 6, 7, 20])
def test_rows_begin_at_a_cache_line(fields):
    rows = make_rows(fields)
    assert rows._words.ctypes.data % 64 == 0
    assert rows._words.strides[0] in (32, 64, 128)


def test_every_row_starts_at_the_initial_values_never_visited():
    values, visits = gathered(make_rows(), range(SAMPLES))
    assert (values == np.array([[0.0], [0.5], [1.0]])).all()
    assert (visits == 0).all()


@given(st.lists(st.tuples(distinct_ids, st.integers(0, 2**32 - 1)), max_size=4), st.data())
def test_scatter_and_gather_agree_with_a_slow_loop(puts, data):
    rows, fields = make_rows(), 3
    model = {i: [[0.0, 0.5, 1.0], 0, 0] for i in range(SAMPLES)}
    for ids, step in puts:
        new = [[data.draw(some_floats) for _ in range(fields)] for _ in ids]
        values = np.array(new, dtype=np.float32).reshape(len(ids), fields).T.copy()
        refused = rows.scatter(np.array(ids, dtype=np.int64), values, step)
        for i, row, is_refused in zip(ids, new, refused, strict=True):
            assert is_refused == (not all(math.isfinite(value) for value in row))
            if not is_refused:
                model[i] = [row, model[i][1] + 1, step]
    rows._dirty[:] = True
    (everything,) = rows.cut()
    for i, (row, visits, last_step) in model.items():
        assert [everything.column(f"field_{f}")[i] for f in range(fields)] == row
        assert (everything.column("visits")[i], everything.column("last_step")[i]) == (visits, last_step)
    asked = data.draw(st.lists(st.integers(0, SAMPLES - 1)))
    values, visits = gathered(rows, asked)
    assert values.T.tolist() == [model[i][0] for i in asked]
    assert visits.tolist() == [model[i][1] for i in asked]


@given(distinct_ids)
def test_a_cut_holds_exactly_the_blocks_with_a_new_row(ids):
    rows = make_rows()
    rows.scatter(np.array(ids, dtype=np.int64), np.ones((3, len(ids)), dtype=np.float32), 1)
    ranges = rows.cut()
    held = {row // BLOCK_ROWS for r in ranges for row in range(r.start, r.stop)}
    assert held == {i // BLOCK_ROWS for i in ids}
    assert all(r.start % BLOCK_ROWS == 0 and (r.stop % BLOCK_ROWS == 0 or r.stop == SAMPLES) for r in ranges)
    assert rows.cut() == []


def test_a_cut_does_not_see_rows_written_after_it():
    rows = make_rows()
    rows.scatter(np.array([9]), np.full((3, 1), 1.0, dtype=np.float32), 1)
    (cut,) = rows.cut()
    rows.scatter(np.array([9]), np.full((3, 1), 2.0, dtype=np.float32), 2)
    assert cut.column("field_0")[9 - cut.start] == 1.0
    assert len(rows.cut()) == 1


def test_a_refused_row_leaves_its_block_unchanged():
    rows = make_rows()
    rows.scatter(np.array([9]), np.full((3, 1), np.nan, dtype=np.float32), 1)
    assert rows.cut() == []


def test_loaded_columns_are_gathered_and_count_as_unchanged():
    rows = make_rows(fields=1)
    columns = {"field_0": np.arange(20, dtype=np.float32)}
    columns |= {name: np.arange(20, dtype=np.uint32) for name in ("visits", "last_step")}
    rows.load(30, columns)
    values, visits = gathered(rows, [29, 30, 49])
    assert values.tolist() == [[0.0, 0.0, 19.0]]
    assert visits.tolist() == [0, 0, 19]
    assert rows.cut() == []
