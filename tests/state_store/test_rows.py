import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermopile.state_store.rows import Blocks, Rows
from thermopile.state_store.schema import Schema

SAMPLES, BLOCK_ROWS, FIRST_ID = 50, 8, 16
IDS = range(FIRST_ID, FIRST_ID + SAMPLES)


def make_rows(fields=3):
    schema = Schema({f"field_{i}": i / 2 for i in range(fields)})
    return Rows(schema, IDS, BLOCK_ROWS, Blocks(schema, SAMPLES, BLOCK_ROWS), step=0)


def gathered(rows, ids):
    ids = np.array(ids, dtype=np.int64)
    values = np.empty((len(rows.schema.names), len(ids)), dtype=np.float32)
    visits = np.empty(len(ids), dtype=np.int32)
    rows.gather(ids, values, visits)
    return values, visits


def put(rows, ids, value, step):
    values = np.full((len(rows.schema.names), len(ids)), value, dtype=np.float32)
    return rows.scatter(np.array(ids, dtype=np.int64), values, step)


def read_parts(rows, since=0):
    """All columns that a snapshot would write, as {id: {column: value}}."""
    return {
        part.start + row: {name: column[row] for name, column in part.columns.items()}
        for part in rows.parts(since)
        for row in range(len(part.columns["visits"]))
    }


distinct_ids = st.lists(st.sampled_from(IDS), unique=True)
some_floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize("fields", [1, 6, 7, 20])
def test_records_begin_at_a_cache_line_and_none_straddles_two_if_it_fits_one(fields):
    words = Blocks(Schema({f"field_{i}": 0.0 for i in range(fields)}), SAMPLES, BLOCK_ROWS).words
    assert words.ctypes.data % 64 == 0
    assert words.strides[0] in (32, 64, 128)


def test_every_row_starts_at_the_initial_values_never_visited():
    values, visits = gathered(make_rows(), IDS)
    assert (values == np.array([[0.0], [0.5], [1.0]])).all()
    assert (visits == 0).all()


@given(st.lists(st.tuples(distinct_ids, st.integers(0, 2**32 - 1)), max_size=4), st.data())
def test_scatter_gather_and_parts_agree_with_a_slow_loop(puts, data):
    rows, fields = make_rows(), 3
    model = {i: [[0.0, 0.5, 1.0], 0, 0] for i in IDS}
    changed = set()
    for ids, step in puts:
        new = [[data.draw(some_floats) for _ in range(fields)] for _ in ids]
        values = np.array(new, dtype=np.float32).reshape(len(ids), fields).T.copy()
        refused = rows.scatter(np.array(ids, dtype=np.int64), values, step)
        for i, row, is_refused in zip(ids, new, refused, strict=True):
            assert is_refused == (not all(math.isfinite(value) for value in row))
            if not is_refused:
                model[i] = [row, model[i][1] + 1, step]
                changed.add((i - FIRST_ID) // BLOCK_ROWS)
    asked = data.draw(st.lists(st.sampled_from(IDS)))
    values, visits = gathered(rows, asked)
    assert values.T.tolist() == [model[i][0] for i in asked]
    assert visits.tolist() == [model[i][1] for i in asked]
    rows.cut()
    written = read_parts(rows)
    assert set(written) == {i for i in IDS if (i - FIRST_ID) // BLOCK_ROWS in changed}
    for i, columns in written.items():
        row, visits, last_step = model[i]
        assert columns == {f"field_{f}": row[f] for f in range(fields)} | {"visits": visits, "last_step": last_step}


@given(st.lists(distinct_ids, max_size=5), st.lists(st.lists(distinct_ids, max_size=5), max_size=4))
def test_parts_are_the_rows_as_cut_whatever_is_put_while_they_are_read(before, between_parts):
    rows, step = make_rows(), 0
    for ids in before:
        step += 1
        put(rows, ids, step, step)
    as_cut = gathered(rows, IDS)[0][0]
    rows.cut()
    reading, written = rows.parts(since=0), {}
    for puts in [*between_parts, *[[]] * SAMPLES]:
        for ids in puts:
            step += 1
            put(rows, ids, step, step)
        if (part := next(reading, None)) is not None:
            written |= {part.start + row: value for row, value in enumerate(part.columns["field_0"].tolist())}
    assert written == {i: as_cut[i - FIRST_ID] for i in written}
    assert {i for ids in before for i in ids} <= set(written)


def test_parts_hold_neighbouring_blocks_together_and_only_changed_ones():
    rows = make_rows()
    put(rows, [FIRST_ID, FIRST_ID + 9, FIRST_ID + 49], 1.0, 1)
    rows.cut()
    assert [(part.start - FIRST_ID, len(part.columns["visits"])) for part in rows.parts(since=0)] == [(0, 16), (48, 2)]


def test_what_was_written_is_not_written_again():
    rows = make_rows()
    put(rows, [FIRST_ID], 1.0, 1)
    rows.cut()
    assert len(read_parts(rows)) == BLOCK_ROWS
    rows.written(1)
    rows.cut()
    assert read_parts(rows, since=1) == {}


def test_parts_since_an_earlier_snapshot_hold_all_changes_as_of_the_cut():
    rows = make_rows()
    for step, id_ in ((1, FIRST_ID), (2, FIRST_ID + 9), (3, FIRST_ID + 20)):
        put(rows, [id_], float(step), step)
        rows.cut()
        read_parts(rows, since=step - 1)
        rows.written(step)
    rows.cut()
    put(rows, [FIRST_ID + 9], 9.0, 4)  # before it is known what must be written
    written = read_parts(rows, since=1)
    assert sorted(written) == [*range(FIRST_ID + 8, FIRST_ID + 24)]
    assert (written[FIRST_ID + 9]["field_0"], written[FIRST_ID + 20]["field_0"]) == (2.0, 3.0)


def test_what_could_not_be_written_is_in_the_next_cut_as_it_is_by_then():
    rows = make_rows()
    put(rows, [FIRST_ID, FIRST_ID + 20], 1.0, 1)
    rows.cut()
    next(rows.parts(since=0))
    put(rows, [FIRST_ID], 2.0, 2)
    rows.not_written()
    rows.cut()
    written = read_parts(rows)
    assert written[FIRST_ID]["field_0"] == 2.0
    assert written[FIRST_ID + 20]["field_0"] == 1.0


def test_a_refused_row_leaves_its_block_unchanged():
    rows = make_rows()
    assert put(rows, [FIRST_ID], np.nan, 1).tolist() == [True]
    rows.cut()
    assert read_parts(rows) == {}
