"""Temperatures of samples that a run was not trained on."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.sources.folder import FolderSource
from thermopile.trainer.run_directory import RunDirectory

from support.cli import answer, assert_one_line, cli, succeed
from support.conversions import dataset_of
from support.pictures import draw
from support.sources import HostileSource
from support.written_checkpoints import save_encoders
from support.written_runs import write_state


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The hostile samples once more, whose captions are other tokens."""
    return dataset_of(HostileSource(), tmp_path_factory.mktemp("other") / "dataset", vocab_size=300, context_length=64)


def run_of(dataset, path, **objective):
    sides = ("image", "text") if dataset.index.mode == "pairs" else ("sample",)
    fields = ("log_s",) if objective.get("name") == "sogclr" else ("tau", "log_s")
    columns = {f"{side}/{name}": np.full(dataset.n, 0.1) for side in sides for name in fields}
    run = write_state(path, dataset, columns, np.full(dataset.n, 6), **objective)
    save_encoders(run, dataset)
    return run


@pytest.fixture(scope="module")
def run(hostile_dataset, tmp_path_factory):
    return run_of(hostile_dataset, tmp_path_factory.mktemp("runs") / "run", rho=0.02)


def test_the_same_samples_in_another_dataset_with_other_tokens_have_the_same_temperatures(run, hostile_dataset, other):
    assert other.index.tokenizer_digest != hostile_dataset.index.tokenizer_digest
    own = answer("inspect", run.path, "--features", "all")["by_features"]
    found = answer("inspect", run.path, "--data", other.path)
    assert found["dataset"] == str(other.path)
    assert {name: own["solved"][name] for name in found["solved"]} == found["solved"]
    assert found["solved"]["samples"] == found["solved"]["others"] == 66
    for side, quantiles in own["tau"].items():
        assert found["tau"][side] == pytest.approx(quantiles, rel=0.01)  # kept features are float16
        assert 0 < quantiles["0.05"] < quantiles["0.95"] < 1


def test_rho_and_the_number_of_samples_are_those_asked_for(run, other):
    found = answer("inspect", run.path, "--data", other.path, "--rho", "0.01", "--features", "40")
    assert (found["solved"]["rho"], found["solved"]["samples"]) == (0.01, 40)


def test_rows_are_exported_with_their_texts_and_the_terminal_says_what_they_are(run, other, tmp_path):
    done = succeed("inspect", run.path, "--data", other.path, "--export", tmp_path / "rows.parquet")
    assert f"The run was not trained on {other.path}: its temperatures are solved from features" in done.stdout
    assert "tau where KL is rho = 0.02, of 66 of 66 samples" in done.stdout
    rows = pq.read_table(tmp_path / "rows.parquet")
    assert rows["sample_id"].to_pylist() == list(range(66))
    assert rows["group"].to_pylist() == other.column("group").to_pylist()
    assert (rows["image/tau_solved"].to_numpy() > 0).all()
    assert set(rows["dataset_fingerprint"].to_pylist()) == {other.index.fingerprint}
    assert not list(run.path.glob("report/*solved*"))


def test_pictures_alone_are_drawn_in_views(images_dataset, tmp_path):
    (tmp_path / "pictures").mkdir()
    for i in range(20):
        draw(i).save(tmp_path / "pictures" / f"{i}.png")
    unseen = dataset_of(FolderSource(tmp_path / "pictures"), tmp_path / "unseen")
    run = run_of(images_dataset, tmp_path / "run", rho=0.001)
    found = answer("inspect", run.path, "--data", unseen.path)
    assert list(found["tau"]) == ["sample"]
    assert found["solved"]["samples"] == 20


def test_options_that_need_the_run_s_own_samples_are_refused(run, other):
    for options in (["--map"], ["--against", "step-5"], ["--confirm"]):
        done = cli("inspect", run.path, "--data", other.path, *options)
        assert_one_line(done, 2, f"{options[0]} has no effect with the --data of another dataset")
    for options in (["--sample", "3"], ["--duplicates"], ["--serve"]):
        done = cli("inspect", run.path, "--data", other.path, *options)
        assert_one_line(done, 1, "is not the dataset that the run was trained on")


def test_what_is_missing_is_one_line(run, flat_dataset, hostile_dataset, other, tmp_path):
    assert_one_line(cli("inspect", run.path, "--data", flat_dataset.path), 1, "has no captions, which the run compares")
    without = run_of(hostile_dataset, tmp_path / "sogclr", name="sogclr")
    assert_one_line(cli("inspect", without.path, "--data", other.path), 1, "has no rho", "choose one with --rho")
    assert answer("inspect", without.path, "--data", other.path, "--rho", "0.01")["solved"]["rho"] == 0.01
    bare = RunDirectory(tmp_path / "bare")
    write_state(bare.path, hostile_dataset, {"image/tau": np.full(66, 0.1)}, np.full(66, 6))
    assert_one_line(cli("inspect", bare.path, "--data", other.path), 1, "has no checkpoint yet")
