"""All samples as one file: what is written is what the dataset and the state hold, whatever the texts."""

import signal
import tempfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thermopile.pipeline.errors import DatasetError
from thermopile.state_store.commit import ColumnPart
from thermopile.state_store.durable import Repository
from thermopile.state_store.reader import StateReader
from thermopile.state_store.schema import Description, Schema
from thermopile.storage.files import writer_name
from thermopile.storage.local import LocalPath
from thermopile.tools.inspection import opening
from thermopile.tools.inspection.opening import Inspection, read_run
from thermopile.tools.inspection.rows_export import check_target, export_rows
from thermopile.tools.inspection.temperatures.kinds import KIND_NAMES
from thermopile.trainer.config import load_config
from thermopile.trainer.errors import ConfigError, RunError
from thermopile.trainer.run_directory import RunDirectory

from support.commits import commit
from support.datasets import write_dataset
from support.written_runs import write_run

TEXTS = ["key", "uri", "caption", "group"]
TABLE = pa.schema([(name, pa.string()) for name in TEXTS] + [("width", pa.int32()), ("height", pa.int32())])
FIELDS = {"image/log_s": -np.inf, "image/tau": 0.05, "text/tau": 0.05}
WORDS = ("NA", "null", "nan", "-inf", "007", "=HYPERLINK(0)", "say \"hi\", 'you'", "a\nb\r\nc\rd", "NUL \0", "\ufeff",
         "\u202egnp", "\\", "x" * 10_000)  # fmt: skip
texts = st.one_of(
    st.none(), st.sampled_from(WORDS), st.text("a\"',;\n\r\t\0\\ =-1é\u202e\U0001f468", min_size=1, max_size=6)
)
floats = st.floats(width=32, allow_nan=False)


def read_csv_with_pyarrow(path, schema):
    return pa.csv.read_csv(
        path,
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(
            column_types=schema, strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )


def read_csv_with_pandas(path):
    """Read it as docs/rows.md does."""
    return pd.read_csv(path, dtype=dict.fromkeys(TEXTS, str), keep_default_na=False, na_values=[""])


def test_pandas_reads_texts_as_they_are_and_missing_numbers_as_numbers(tmp_path):
    (tmp_path / "rows.csv").write_text('sample_id,key,caption,misfit_rank\n0,"007","NA",\n1,"8",,2\n', "utf-8")
    rows = read_csv_with_pandas(tmp_path / "rows.csv")
    assert rows[["key", "caption"]].fillna("").to_numpy().tolist() == [["007", "NA"], ["8", ""]]
    assert (rows["misfit_rank"].min(), rows["misfit_rank"].isna().tolist()) == (2.0, [True, False])


def assert_pandas_reads_the_same(path, whole):
    """A missing text reads as an empty one: CSV does not distinguish them."""
    found = read_csv_with_pandas(path)
    assert list(found.columns) == whole.column_names
    for name in whole.column_names:
        if name in (*TEXTS, "kind", "kind_from"):
            assert found[name].fillna("").tolist() == [text or "" for text in whole[name].to_pylist()]
        else:
            np.testing.assert_array_equal(found[name].to_numpy(whole[name].to_numpy().dtype), whole[name].to_numpy())


@st.composite
def runs(draw):
    """Shards of the samples table and columns of the state."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    n, counts = sum(sizes), st.integers(0, 2**31 - 1)

    def column(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    table = pa.table({field.name: column(texts if field.name in TEXTS else counts) for field in TABLE}, schema=TABLE)
    state = {name: np.array(column(floats), np.float32) for name in FIELDS}
    state |= {name: np.array(column(st.integers(0, 2**32 - 1)), np.uint32) for name in ("visits", "last_step")}
    return [table.slice(sum(sizes[:i]), size) for i, size in enumerate(sizes)], state


def hostile_run_of_texts():
    n = len(WORDS) + 1
    table = pa.table({name: [*WORDS, None] for name in TEXTS} | {"width": range(n), "height": range(n)}, schema=TABLE)
    state = {name: np.linspace(-1, 1, n, dtype=np.float32) for name in FIELDS}
    state["image/log_s"][-1] = -np.inf
    return [table], state | {name: np.arange(n, dtype=np.uint32) for name in ("visits", "last_step")}


@settings(max_examples=6)
@given(runs(), st.integers(1, 8), st.integers(1, 12))
@example(hostile_run_of_texts(), 4, 8)
def test_what_is_written_is_the_samples_table_and_the_state(run, block_rows, rows_at_once):
    shards, state = run
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "STATE_ROWS_AT_ONCE", rows_at_once)
        folder = LocalPath(folder)
        dataset = write_dataset(folder / "data", shards)
        repository = Repository.create(folder / "state", Description(dataset.n, Schema(FIELDS), block_rows, "f"))
        commit(repository, 7, [ColumnPart(0, state)])
        config = load_config({"data": {"path": str(dataset.path)}})
        inspection = Inspection(RunDirectory(folder), config, StateReader.open(folder / "state"), dataset, [])
        for name in ("rows.parquet", "rows.csv"):
            export_rows(inspection, folder / name)
        table = pa.concat_tables(shards)
        expected = {"sample_id": np.arange(dataset.n)} | {name: table[name] for name in TABLE.names} | state
        whole = pq.read_table(folder / "rows.parquet")
        assert whole.drop_columns(["kind", "kind_from", "dataset_fingerprint"]) == pa.table(expected)
        assert set(whole["dataset_fingerprint"].to_pylist()) == {"f"}
        assert set(whole["kind"].to_pylist()) <= set(KIND_NAMES)
        assert read_csv_with_pyarrow(folder / "rows.csv", whole.schema) == whole
        assert_pandas_reads_the_same(folder / "rows.csv", whole)


@pytest.fixture(scope="module")
def inspection(hostile_run):
    return read_run(hostile_run)


def test_the_texts_of_a_hostile_dataset_load_back(inspection, tmp_path):
    for name in ("rows.parquet", "rows.csv"):
        export_rows(inspection, tmp_path / name)
    whole = pq.read_table(tmp_path / "rows.parquet")
    assert whole["caption"] == inspection.dataset.column("caption")
    assert read_csv_with_pyarrow(tmp_path / "rows.csv", whole.schema) == whole
    assert_pandas_reads_the_same(tmp_path / "rows.csv", whole)


def test_log_s_of_a_sample_never_visited_is_read_as_minus_infinity(flat_dataset, tmp_path):
    visited = np.arange(16) < 10
    run = write_run(tmp_path / "run", flat_dataset, {"sample": np.full(16, 0.07)}, visited=visited)
    export_rows(read_run(run), tmp_path / "rows.csv")
    rows = read_csv_with_pandas(tmp_path / "rows.csv")
    np.testing.assert_array_equal(np.isneginf(rows["sample/log_s"]), ~visited)
    np.testing.assert_array_equal(rows["visits"], visited)


def test_the_metadata_of_parquet_name_the_snapshot_and_the_dataset(inspection, tmp_path):
    export_rows(inspection, tmp_path / "rows.parquet")
    snapshot = inspection.reader.snapshot
    assert pq.read_schema(tmp_path / "rows.parquet").metadata == {
        b"thermopile.snapshot": snapshot.id.encode(),
        b"thermopile.tag": snapshot.tag.encode(),
        b"thermopile.step": str(snapshot.step).encode(),
        b"thermopile.dataset_fingerprint": inspection.dataset.index.fingerprint.encode(),
    }


def test_without_its_dataset_the_state_s_columns_are_written_alone(inspection, tmp_path):
    alone = Inspection(inspection.run, inspection.config, inspection.reader, None, ["gone"])
    export_rows(alone, tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet").column_names == [
        "sample_id", *inspection.reader.columns, "kind", "kind_from", "dataset_fingerprint",
    ]  # fmt: skip


def test_an_export_interrupted_leaves_what_was_there(inspection, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "STATE_ROWS_AT_ONCE", 32)
    (tmp_path / "rows.csv").write_text("keep me")
    told = []

    def interrupt(done, total):
        told.append((done, sorted(path.name for path in tmp_path.iterdir())))
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        export_rows(inspection, tmp_path / "rows.csv", interrupt)
    assert told == [(32, [f".rows.csv.{writer_name()}.partial", "rows.csv"])]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["keep me"]


def test_a_damaged_shard_ends_the_export_and_is_named(tmp_path):
    table = pa.table({"uri": ["a.png"] * 16})
    dataset = write_dataset(tmp_path / "data", [table, table])
    inspection = read_run(write_run(tmp_path / "run", dataset, {"sample": np.full(32, 0.07)}))
    (dataset.path / "shards" / "shard-00001.parquet").write_bytes(b"not Parquet at all")
    with pytest.raises(DatasetError, match=r"shard-00001.parquet was changed after conversion"):
        export_rows(inspection, tmp_path / "rows.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run"]


def test_a_run_without_a_snapshot_has_nothing_to_export(flat_dataset, tmp_path):
    run = write_run(tmp_path / "run", flat_dataset, {}, snapshot=False)
    with pytest.raises(RunError, match=r"run has no snapshot of its state yet"):
        export_rows(read_run(run), tmp_path / "rows.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("rows.xlsx", r"rows.xlsx does not end in .parquet or .csv"),
        ("missing/rows.csv", r"missing does not exist; create it first"),
        ("there.csv", r"there.csv exists; choose another name, or replace it with --overwrite"),
        ("folder.csv", r"folder.csv is a directory"),
    ],
)
def test_a_target_that_cannot_be_written_is_refused(tmp_path, to, said):
    (tmp_path / "there.csv").touch()
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=said):
        check_target(tmp_path / to, overwrite=False)


def test_overwrite_lets_a_file_be_replaced(tmp_path):
    (tmp_path / "there.csv").touch()
    check_target(tmp_path / "there.csv", overwrite=True)
    check_target(tmp_path / "new.parquet", overwrite=False)
