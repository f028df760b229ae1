"""A cut keeps old rows in memory while blocks are written; the rows here change several times meanwhile."""

import numpy as np

from thermopile.state_store.rows import Blocks, Rows
from thermopile.state_store.schema import Schema

SAMPLES, BLOCK_ROWS = 5_000, 50
SCHEMA = Schema({"tau": 0.0, "u": 0.0})


def put(rows, ids, step):
    """Give each row values that no other row and no other step has."""
    rows.scatter(ids, np.stack([ids + SAMPLES * step, -ids - SAMPLES * step]).astype(np.float32), step)


def test_parts_are_as_cut_while_rows_change_again_and_again():
    rows = Rows(SCHEMA, range(SAMPLES), BLOCK_ROWS, Blocks(SCHEMA, SAMPLES, BLOCK_ROWS), step=0)
    everyone, random = np.arange(SAMPLES), np.random.default_rng(0)
    put(rows, everyone, 1)
    for step in range(1, 9):
        as_cut = rows.blocks.words.copy()
        rows.cut()
        for ids in np.split(random.permutation(everyone)[:2_500], [1_024, 1_025, 1_800]):
            put(rows, ids, step + 1)
        parts = []
        for part in rows.parts(since=step - 1):
            parts.append(np.stack([column.view(np.uint32) for column in part.columns.values()]).T)
            put(rows, random.permutation(everyone)[:700], step + 1)
        np.testing.assert_array_equal(np.concatenate(parts), as_cut[:, :4])
        rows.written(step)
        put(rows, everyone, step + 1)
