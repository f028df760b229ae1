"""The samples table of a dataset: in order in pieces of any length, and by id."""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.pipeline.dataset.index import seal_index
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.opening import Dataset
from thermopile.storage.files import NotRegularFileError, sha256_of
from thermopile.storage.sealed_json import seal_document

from support.datasets import write_dataset


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
def three_shards(tmp_path):
    return write_dataset(tmp_path / "data", tables_of([4, 1, 3]))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 9), st.data())
def test_tables_and_take_give_the_rows_of_the_ids_whatever_the_shards(shards, rows, data):
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
def test_a_missing_column_and_a_table_that_is_not_what_was_converted_are_named(three_shards, read):
    with pytest.raises(DatasetError, match=r"no column 'colour'; it has row, uri, caption"):
        read(three_shards, "colour")
    shard = three_shards.path / "shards" / "shard-00002.parquet"
    pq.write_table(pq.read_table(shard).slice(1), shard)
    with pytest.raises(DatasetError, match=r"shard-00002.parquet was changed after conversion: its sha256 differs"):
        read(Dataset(three_shards.path), "uri")


@pytest.mark.parametrize(("table", "column", "message"), [
    (pa.table({"row": [0, 1]}), "row", "holds 2 rows, but dataset.json says 3"),
    (pa.table({"row": [0, 1, 2], "captions": ["a", "b", "c"]}), "caption", "captions has type string"),
    (pa.table({"row": pa.array([b"\xed\xa0\x80", b"", b""]).view(pa.string())}), "row", "cannot be read"),
    (None, "row", "cannot be read"),
])  # fmt: skip
def test_a_table_that_somebody_made_up_is_one_error_though_its_digest_fits(three_shards, table, column, message):
    shard = three_shards.path / "shards" / "shard-00002.parquet"
    pq.write_table(table, shard) if table else shard.write_bytes(b"not Parquet at all")
    index = json.loads((three_shards.path / "dataset.json").read_text())
    index["shard_digests"][2]["parquet"] = sha256_of(shard)
    for name in ("format", "fingerprint", "sha256"):
        del index[name]
    (three_shards.path / "dataset.json").write_bytes(seal_index(index))
    with pytest.raises(DatasetError, match=rf"shard-00002\.parquet.*{message}") as raised:
        Dataset(three_shards.path).take(np.array([5]), [column])
    assert len(str(raised.value).splitlines()) == 1


def test_a_dataset_s_path_may_be_a_string(three_shards):
    assert Dataset(str(three_shards.path)).n == 8


def sealed(**changes):
    def change(index):
        index |= changes
        return seal_document(index)

    return change


@pytest.mark.parametrize("text", [
    lambda index: b"[" * 100_000,
    lambda index: b"[]",
    lambda index: b"",
    lambda index: b'{"format": 1}',
    lambda index: b'{"format": 1, "fingerprint": [[[]]]}',
    lambda index: json.dumps(index).encode(),  # without its checksum
    sealed(n="8"), sealed(n=8.0), sealed(n=-8), sealed(n=2**80), sealed(n=7), sealed(n=None),
    sealed(first_id=[0, 4, 5, 2**70]), sealed(first_id=[0, 4, 3, 8]), sealed(first_id=[]), sealed(first_id=[0, 8]),
    sealed(first_id=8), sealed(shard_digests=[]), sealed(shard_digests=[{}] * 3), sealed(shard_digests="abc"),
    sealed(mode="pairs"), sealed(captions_per_sample=1), sealed(captions_per_sample=2**40), sealed(mode=["images"]),
    sealed(tokenizer={"vocab_size": 2**40, "context_length": 32, "end_id": 2}), sealed(tokenizer_digest="../../x"),
    sealed(source={"root": "\ud800"}), sealed(source=[]), sealed(more=1), sealed(format=3),
    sealed(fingerprint="0" * 64),
])  # fmt: skip
def test_an_index_that_somebody_made_up_is_one_error(three_shards, text):
    file = three_shards.path / "dataset.json"
    index = json.loads(file.read_text())
    del index["sha256"]
    file.write_bytes(text(index))
    with pytest.raises(DatasetError, match=r"dataset\.json cannot be used") as raised:
        Dataset(three_shards.path)
    assert len(str(raised.value).splitlines()) == 1
    str(raised.value).encode()


def test_every_flipped_bit_of_an_index_is_found(three_shards):
    file = three_shards.path / "dataset.json"
    text = file.read_bytes()
    for place in range(len(text) - 1):  # behind the last character is a newline, which no reader uses
        file.write_bytes(text[:place] + bytes([text[place] ^ 1 << place % 8]) + text[place + 1 :])
        with pytest.raises(DatasetError, match=r"dataset\.json cannot be used"):
            Dataset(three_shards.path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize(("name", "read"), [
    ("dataset.json", lambda dataset: Dataset(dataset.path)),
    ("tokenizer.json", lambda dataset: dataset.tokenizer_path),
    ("shards/shard-00000.parquet", lambda dataset: dataset.take(np.array([0]), ["uri"])),
    ("shards/shard-00000.beton", lambda dataset: dataset.jpeg(0)),
    ("shards/shard-00000.rows", lambda dataset: dataset.jpeg(0)),
])  # fmt: skip
def test_a_pipe_a_directory_or_a_device_in_a_files_place_is_refused_at_once(three_shards, make, name, read):
    path = three_shards.path / name
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises((DatasetError, NotRegularFileError), match=path.name):
        read(three_shards)
