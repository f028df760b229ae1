"""A run opened in a notebook: arrays read as they are indexed, frames of any samples; the documentation's examples."""

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icechunk import IcechunkStore

import thermopile
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.opening import Dataset
from thermopile.state_store.errors import FieldError, SampleIdError, SnapshotNotFoundError
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.rows_export import export_rows
from thermopile.trainer.errors import RunError

from support.datasets import write_dataset
from support.written_runs import train_on, write_run

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def opened(hostile_run):
    return thermopile.open_run(hostile_run.path)


@pytest.fixture(scope="module")
def temperatures(opened):
    return opened.temperatures()


def test_an_opened_run_has_its_settings_snapshots_and_dataset(opened, hostile_run, hostile_dataset):
    assert (opened.path, opened.notes) == (hostile_run.path, [])
    assert opened.config == hostile_run.config()
    assert [snapshot.tag for snapshot in opened.snapshots] == ["step-0", "step-5"]
    assert opened.dataset.index == hostile_dataset.index


def test_temperatures_are_arrays_by_side_at_the_snapshot_asked_for(opened, tau_by_class_size):
    latest, start = opened.temperatures(), opened.temperatures("step-0")
    assert (latest.snapshot.tag, start.snapshot.tag) == ("step-5", "step-0")
    assert latest.sides == ("image", "text") == tuple(latest.tau)
    np.testing.assert_array_equal(latest.tau["image"][:], tau_by_class_size.astype(np.float32))
    np.testing.assert_array_equal(latest.array("visits")[3:5], [1, 1])
    np.testing.assert_array_equal(start.array("visits")[3:5], [0, 0])


def test_the_frame_of_all_samples_is_what_an_export_writes(temperatures, hostile_run, tmp_path):
    export_rows(read_run(hostile_run), tmp_path / "rows.parquet")
    exported = (
        pq.read_table(tmp_path / "rows.parquet").drop_columns("dataset_fingerprint").to_pandas().set_index("sample_id")
    )
    pd.testing.assert_frame_equal(temperatures.frame(), exported.drop(columns=["kind", "kind_from"]))
    pd.testing.assert_frame_equal(temperatures.frame(columns=["kind"]), exported[["kind"]], check_dtype=False)
    assert tuple(exported.columns) == (*temperatures.columns, "kind", "kind_from")


@settings(max_examples=10)
@given(
    st.one_of(st.slices(66), st.lists(st.integers(0, 65)), st.builds(range, st.integers(0, 66), st.integers(0, 66))),
    st.permutations(["caption", "width", "text/tau", "last_step"]),
)
def test_a_frame_has_the_rows_and_columns_asked_for_in_their_order(temperatures, sample_ids, columns):
    ids = range(66)[sample_ids] if isinstance(sample_ids, slice) else sample_ids
    pd.testing.assert_frame_equal(
        temperatures.frame(sample_ids, columns[:3]), temperatures.frame().loc[list(ids), columns[:3]]
    )


def test_a_frame_of_a_few_samples_reads_their_blocks_and_shards_alone(tmp_path, monkeypatch):
    names = [[f"{shard}-{row}" for row in range(32)] for shard in range(3)]
    dataset = write_dataset(tmp_path / "data", [pa.table({"uri": of_shard}) for of_shard in names])
    tau = np.linspace(0.01, 0.9, 96, dtype=np.float32)
    run = write_run(tmp_path / "run", dataset, {"sample": tau})  # in blocks of 16 rows
    temperatures, read, fetch = thermopile.open_run(run.path).temperatures(), [], IcechunkStore.get

    def recorded(store, key, *given, **named):
        read.append(key)
        return fetch(store, key, *given, **named)

    monkeypatch.setattr(IcechunkStore, "get", recorded)
    (dataset.path / "shards" / "shard-00001.parquet").unlink()
    frame = temperatures.frame([90, 3, 85, 3], ["sample/tau", "uri"])
    assert frame["uri"].tolist() == ["2-26", "0-3", "2-21", "0-3"]
    np.testing.assert_array_equal(frame["sample/tau"], tau[[90, 3, 85, 3]])
    assert sorted(key for key in read if "/c/" in key) == ["sample/tau/c/0", "sample/tau/c/5"]
    assert temperatures.frame(columns=["sample/tau"]).shape == (96, 1)  # no shard is read for it


def test_frames_are_all_samples_piece_by_piece(temperatures):
    pieces = list(temperatures.frames(["group", "image/tau"], rows=25))
    assert [len(piece) for piece in pieces] == [25, 25, 16]
    pd.testing.assert_frame_equal(pd.concat(pieces), temperatures.frame(columns=["group", "image/tau"]))


@pytest.mark.parametrize("sample_ids", [[-1], [0, 66], [0.5], [True, False], ["a"], 3, [[1]]])
def test_an_invalid_sample_id_is_refused(temperatures, sample_ids):
    with pytest.raises(SampleIdError, match="sample ids"):
        temperatures.frame(sample_ids)


def test_an_unknown_column_is_named_with_the_list_of_columns(temperatures):
    with pytest.raises(
        FieldError, match=r"no such column: 'tau'; the columns are \['key', 'uri', .*'last_step', 'kind'\]"
    ):
        temperatures.frame([0], ["tau", "visits"])
    with pytest.raises(FieldError, match="no column 'caption'"):
        temperatures.array("caption")


def test_without_its_dataset_a_run_opens_and_says_why_it_has_no_captions(flat_dataset, tmp_path):
    shutil.copytree(flat_dataset.path, tmp_path / "data")
    run = write_run(tmp_path / "run", Dataset(tmp_path / "data"), {"sample": np.full(16, 0.07)})
    (tmp_path / "data").rename(tmp_path / "moved")
    opened = thermopile.open_run(str(run.path))
    assert opened.dataset is None
    assert "If the run's dataset was moved, pass its new path with --data" in " ".join(opened.notes)
    assert opened.temperatures().frame().columns.tolist() == ["sample/log_s", "sample/tau", "sample/u", "visits",
                                                              "last_step"]  # fmt: skip
    found = thermopile.open_run(run.path, data=tmp_path / "moved")
    assert (found.dataset.n, found.notes) == (16, ["The samples have no captions: the dataset holds images only."])
    assert found.temperatures().frame([3])["uri"].tolist() == flat_dataset.column("uri").to_pylist()[3:4]


def test_a_run_that_goes_on_shows_its_new_snapshots(flat_dataset, tmp_path):
    run = write_run(tmp_path / "run", flat_dataset, {"sample": np.full(16, 0.07)})
    opened = thermopile.open_run(run.path)
    train_on(run, {"sample": np.full(16, 0.5)}, step=9)
    assert [snapshot.step for snapshot in opened.snapshots] == [0, 5, 9]
    assert opened.temperatures().tau["sample"][0] == 0.5
    assert opened.temperatures("step-5").tau["sample"][0] == np.float32(0.07)


def test_a_run_without_a_snapshot_opens_and_has_no_temperatures_yet(flat_dataset, tmp_path):
    opened = thermopile.open_run(write_run(tmp_path / "run", flat_dataset, {}, snapshot=False).path)
    assert opened.snapshots == []
    with pytest.raises(RunError, match="has no snapshot of its state yet; the first checkpoint writes one"):
        opened.temperatures()


def test_what_cannot_be_opened_says_why(opened, flat_dataset, tmp_path):
    with pytest.raises(RunError, match="is not a run"):
        thermopile.open_run(tmp_path)
    with pytest.raises(DatasetError, match="not the dataset that the run was trained on"):
        thermopile.open_run(opened.path, data=flat_dataset.path)
    with pytest.raises(SnapshotNotFoundError, match="step-5"):
        opened.temperatures("step-6")


def examples(title):
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", (DOCS / "rows.md").read_text("utf-8"), re.M | re.S)
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_the_notebook_of_the_documentation_runs(hostile_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "run").symlink_to(hostile_run.path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = {}
    for code in examples("In a notebook"):
        exec(code, names)
    assert names["by_class"]["size"].tolist() == [1, 2, 4, 8, 16, 34]
    assert f"{names['rows']['image/tau'].min():.6f}" in capsys.readouterr().out


def test_the_lines_of_the_documentation_load_an_export_into_pandas(hostile_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.parquet", "rows.csv"):
        export_rows(read_run(hostile_run), Path(name))
    code, *_ = examples("Rows in other programs")
    from_parquet, from_csv = {}, {}
    exec(code.partition("rows = pd.read_csv")[0], from_parquet)
    exec(code, from_csv)
    expected = from_parquet["rows"].replace({"caption": {"": None}})  # of which a csv does not tell one from none
    pd.testing.assert_frame_equal(from_csv["rows"], expected, check_dtype=False)
