"""A folder for FiftyOne, as it imports it: samples.json in its layout without metadata.json, and pictures in data/."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.errors import DatasetError
from thermopile.tools.inspection.opening import Inspection, read_run
from thermopile.tools.inspection.rows_export import export_rows
from thermopile.trainer.errors import RunError

from support.cli import assert_one_line, cli, succeed
from support.written_runs import write_run


def test_every_sample_has_its_row_and_its_stored_picture(hostile_run, tmp_path):
    inspection = read_run(hostile_run)
    said = succeed("inspect", hostile_run.path, "--export", tmp_path / "rows.fiftyone")
    succeed("inspect", hostile_run.path, "--export", tmp_path / "rows.parquet")
    samples = json.loads((tmp_path / "rows.fiftyone/samples.json").read_text("utf-8"))["samples"]
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    for sample, row in zip(samples, rows, strict=True):
        picture = tmp_path / "rows.fiftyone" / sample.pop("filepath")
        assert picture.read_bytes() == inspection.dataset.jpeg(row["sample_id"])
        assert sample.pop("tags") == []
        finite = {name: value for name, value in row.items() if not isinstance(value, float) or math.isfinite(value)}
        assert sample == {name.replace("/", "_"): value for name, value in finite.items() if value is not None}
    assert "image_tau" in samples[0]
    assert f"{len(rows):,} rows" in said.stdout


def test_what_was_never_visited_has_no_log_s_rather_than_an_infinite_one(flat_dataset, tmp_path):
    visited = np.arange(16) < 10
    run = write_run(tmp_path / "run", flat_dataset, {"sample": np.full(16, 0.07)}, visited=visited)
    export_rows(read_run(run), tmp_path / "rows.fiftyone")
    samples = json.loads((tmp_path / "rows.fiftyone/samples.json").read_text("utf-8"))["samples"]
    assert ["sample_log_s" in sample for sample in samples] == visited.tolist()


def test_a_folder_that_is_there_is_kept(hostile_run, tmp_path):
    (tmp_path / "rows.fiftyone").mkdir()
    for words in ((), ("--overwrite",)):
        done = cli("inspect", hostile_run.path, "--export", tmp_path / "rows.fiftyone", *words)
        assert_one_line(done, 2, "rows.fiftyone is a directory; choose another name")


def test_nothing_is_left_where_a_picture_or_the_dataset_cannot_be_read(hostile_run, tmp_path, monkeypatch):
    inspection = read_run(hostile_run)

    def fail(sample_id):
        raise DatasetError(f"sample {sample_id} is damaged")

    monkeypatch.setattr(inspection.dataset, "jpeg", fail)
    with pytest.raises(DatasetError, match="sample 0 is damaged"):
        export_rows(inspection, tmp_path / "rows.fiftyone")
    alone = Inspection(inspection.run, inspection.config, inspection.reader, None, ["gone"])
    with pytest.raises(RunError, match="needs the pictures of the run's dataset; say with --data where it is now"):
        export_rows(alone, tmp_path / "rows.fiftyone")
    assert [*tmp_path.iterdir()] == []
