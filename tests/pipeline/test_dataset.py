"""The samples table of a dataset: in order in pieces of any length, and by id."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.errors import DatasetError


def table_of(first, count):
    """Samples first … first + count - 1; every third has no caption."""
    ids = range(first, first + count)
    return pa.table({
        "uri": pa.array([f"{i}.png" for i in ids], pa.string()),
        "caption": pa.array([f"sample {i}" if i % 3 else None for i in ids], pa.string()),
    })  # fmt: skip


def tables_of(shards):
    return [table_of(first, count) for first, count in zip(np.cumsum([0, *shards]), shards, strict=False)]


@pytest.fixture
def three_shards(tmp_path, write_dataset):
    return write_dataset(tmp_path / "data", tables_of([4, 1, 3]))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 9), st.data())
def test_tables_and_take_give_the_rows_of_the_ids_whatever_the_shards(write_dataset, shards, rows, data):
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder) / "data", tables_of(shards))
        whole = table_of(0, dataset.n)
        pieces = list(dataset.tables(["caption", "uri"], rows))
        assert pa.concat_tables(pieces) == whole.select(["caption", "uri"])
        assert [len(piece) for piece in pieces[:-1]] == [rows] * (len(pieces) - 1)
        ids = np.array(data.draw(st.lists(st.integers(0, dataset.n - 1))), np.int64)
        assert dataset.take(ids, ["uri", "caption"]) == whole.take(ids)
        row_of = np.concatenate([np.arange(count) for count in shards])[ids].tolist()
        texts = whole.take(ids).to_pylist()
        expected = [{"sample_id": i, "row": r, **t} for i, r, t in zip(ids.tolist(), row_of, texts, strict=True)]
        assert dataset.rows(ids.tolist()) == expected


def test_take_reads_only_the_shards_of_the_ids(three_shards):
    (three_shards.path / "shards" / "shard-00000.parquet").unlink()
    assert three_shards.take(np.array([7, 4]), ["uri"])["uri"].to_pylist() == ["7.png", "4.png"]


def test_the_schema_names_the_columns_of_the_samples_table(three_shards):
    assert three_shards.schema.names == ["row", "uri", "caption"]


@pytest.mark.parametrize("read", [
    lambda dataset, name: list(dataset.tables([name], 3)),
    lambda dataset, name: dataset.take(np.array([5]), [name]),
])  # fmt: skip
def test_a_missing_column_a_missing_row_and_a_damaged_file_are_named(three_shards, read):
    with pytest.raises(DatasetError, match=r"no column 'colour'; it has row, uri, caption"):
        read(three_shards, "colour")
    shard = three_shards.path / "shards" / "shard-00002.parquet"
    pq.write_table(table_of(0, 2), shard)
    with pytest.raises(DatasetError, match=r"shard-00002.parquet holds 2 rows, but dataset.json says 3"):
        read(three_shards, "uri")
    shard.write_bytes(b"not Parquet at all")
    with pytest.raises(DatasetError, match=r"shard-00002.parquet cannot be read"):
        read(Dataset(three_shards.path), "uri")
