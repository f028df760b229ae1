"""`thermopile score`: every pair judged by a model as it is, in a run that other commands read."""

import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from thermopile.benchmarks.object_server import uploaded
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.state_store.reader import StateReader
from thermopile.storage.bucket import Address
from thermopile.tools.score import score
from thermopile.trainer.config import RANDOM
from thermopile.trainer.loop import FrozenPass
from thermopile.trainer.run.build import create_order, objective_of, recipe_named
from thermopile.trainer.run_directory import RunDirectory

from support.cli import answer, assert_one_line, cli, sets, succeed
from support.conversions import dataset_of
from support.mixtures import made_parts
from support.runs import assert_same_run, finish, small, stop_at, train, weights
from support.whole_models import CONTEXT, DIM, MEAN, SIDE, save_whole
from support.written_runs import write_state

CHECKPOINTS = sets("checkpoint.every_steps=2", "checkpoint.every_minutes=0")
OFTEN = ("--batches", 2, *CHECKPOINTS, *sets("batch_size=256", "log_every=1"))


@pytest.fixture(scope="module")
def model(pairs_dataset, tmp_path_factory):
    """A run with batch norms whose running means are not those of a batch."""
    model = {"dim": 16, "image": {"config": {"width": 4, "batch_norm": True}}, "text": {"config": {"width": 8}}}
    config = small(pairs_dataset, epochs=1, model=model)
    return train(config, tmp_path_factory.mktemp("model") / "run")


def scored(data, model, out, *more):
    return succeed("score", *data, "--model", model, "--out", out, *more) and RunDirectory(out)


@pytest.fixture(scope="module")
def run(pairs_dataset, model, tmp_path_factory):
    """2,000 pairs in 8 steps of 256, of which the last serves 48 samples again."""
    return scored([pairs_dataset.path], model.path, tmp_path_factory.mktemp("scored") / "run", *OFTEN)


def test_every_pair_has_the_log_s_of_float64_over_its_batch(pairs_dataset, model, run, tmp_path):
    succeed("embed", model.path, pairs_dataset.path, tmp_path / "features.parquet", "--dtype", "float")
    table, config = pq.read_table(tmp_path / "features.parquet"), run.config()
    features = [np.stack(table[side].to_numpy()).astype(np.float64) for side in ("image", "text")]
    order = create_order(config, pairs_dataset, objective_of(config))
    expected = np.full(pairs_dataset.n, np.nan)
    for step in range(order.steps_per_epoch):
        ids = order.batch_ids(0, step)
        pictures, captions = (of[ids] for of in features)
        similarity = pictures @ captions.T
        h = (similarity - np.diag(similarity)[:, None]) / config.objective.settings["tau"]
        np.fill_diagonal(h, -np.inf)
        expected[ids] = np.logaddexp.reduce(h, axis=1) - np.log(len(ids) - 1)
    reader = StateReader.open(run.state)
    np.testing.assert_allclose(reader.column("image/log_s"), expected, atol=2e-4)
    assert (reader.column("visits") >= 1).all()


def test_no_weight_and_no_running_mean_changes(model, run):
    before, after = weights(model), weights(run)
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_a_pass_stopped_and_resumed_gives_the_same_bits(run, tmp_path):
    config, other = run.config(), RunDirectory(tmp_path / "run")
    with FrozenPass.open(config, other) as stopped, pytest.raises(KeyboardInterrupt):
        stopped.train(on_report=stop_at(5))
    with FrozenPass.open(config, other, resume=True) as resumed:
        assert resumed.run.steps_done == 4
        resumed.train()
    assert_same_run(other, run)


@pytest.mark.wide
def test_the_run_is_read_by_inspect_curate_and_status(run, tmp_path):
    found = answer("inspect", run.path)
    assert found["kinds"]["too_few_visits"]["samples"] == 0
    assert found["kinds"]["misfit"]["samples"] > 0
    assert found["wrong_captions"]["planted"] == 2000
    assert answer("status", run.path)["total_steps"] == 8
    succeed("inspect", run.path, "--export", tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pandas()
    assert {"image/tau", "text/margin", "pair/similarity"} < {*rows}
    score = rows["image/log_s"] + rows["text/log_s"]
    assert (score[np.argsort(rows["misfit_rank"])].diff().dropna() <= 0).all()
    assert rows["expected_precision"][rows["misfit_rank"] > 100].notna().all()
    curated = answer("curate", run.path, "--keep", tmp_path / "keep.parquet", "--drop-misfits", 50)
    assert curated["samples"]["misfit"] == 50


def test_a_whole_clip_gives_its_temperature_and_its_normalisation(tmp_path):
    save_whole(tmp_path / "clip", "clip")
    tokens = {"tokenizer": tmp_path / "clip" / "tokenizer.json", "context_length": CONTEXT}
    pairs = dataset_of(GlyphSource(0, test=True), tmp_path / "glyphs", np.arange(0, 1920, 15), **tokens)
    config = scored(
        [pairs.path], f"hf:{tmp_path / 'clip'}", tmp_path / "run", *sets(f"data.image_size={SIDE}")
    ).config()
    assert config.objective.settings["tau"] == pytest.approx(np.exp(-2.0))
    assert (list(recipe_named(config.data.recipe).mean), config.model.dim) == (MEAN, DIM)


def test_random_weights_and_other_tokens_are_refused(pairs_dataset, model, tmp_path):
    words = ["score", pairs_dataset.path, "--out", tmp_path / "run", "--model"]
    assert_one_line(cli(*words, "hf:vit-b", *sets("model.text.name=hf:clip-text")), 2, "random weights", "--model RUN")
    other = dataset_of(GlyphSource(1, test=True), tmp_path / "other", np.arange(300))
    done = cli("score", other.path, "--out", tmp_path / "run", "--model", model.path)
    assert_one_line(done, 2, "other tokens", "--tokenizer", model.tokenizer)


def test_a_run_on_pictures_alone_is_not_sent_for_a_tokenizer_that_it_lacks(pairs_dataset, images_dataset, tmp_path):
    columns = {"sample/tau": np.full(images_dataset.n, 0.1)}
    pictures = write_state(tmp_path / "pictures", images_dataset, columns, np.full(images_dataset.n, 5))
    done = cli("score", pairs_dataset.path, "--out", tmp_path / "run", "--model", pictures.path)
    assert_one_line(done, 2, f"{pictures.path} was trained on pictures alone and cannot judge captions")
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_neither_a_run_nor_a_librarys_is_no_run(pairs_dataset, tmp_path):
    refused = cli("score", pairs_dataset.path, "--model", tmp_path / "none", "--out", tmp_path / "run")
    assert_one_line(refused, 2, f"--model {tmp_path / 'none'}: there is no run there", "name a run, hf:…")
    assert not (tmp_path / "run").exists()


def test_the_help_names_no_option_of_training_that_is_not_there():
    shown = succeed("score", "--help").stdout
    assert {*re.findall(r"--[a-z-]+", shown)} <= {option for of in score.params for option in of.opts} | {
        "--help", "--keep", "--precision",
    }  # fmt: skip
    assert "Train on" not in shown


@pytest.mark.wide
def test_mixtures_and_windows_are_scored_whole(pairs_dataset, model, tmp_path):
    parts = [part.path for part in made_parts(pairs_dataset, tmp_path, 1200, 700)]
    mixed = StateReader.open(scored(parts, model.path, tmp_path / "mixed", "--batches", 2).state)
    assert (mixed.column("visits")[:1900] >= 1).all()
    windows = sets("order.canonical_shards=2", "order.blocks_per_shard=4", "order.window_blocks=1", "batch_size=256")
    windowed = scored([pairs_dataset.path], model.path, tmp_path / "windowed", "--batches", 2, *windows,
                      *sets("state.memory_budget=120kB"))  # fmt: skip
    assert (StateReader.open(windowed.state).column("visits") >= 1).all()


@pytest.mark.wide
def test_a_bucket_is_scored_as_a_folder_is(run, model, pairs_dataset, tmp_path, s3, monkeypatch):
    monkeypatch.setenv("THERMOPILE_CACHE", str(tmp_path / "cache"))
    place = uploaded(pairs_dataset.path, Address("bucket", "pairs"))
    assert_same_run(scored([place], model.path, Address("bucket", "scored"), *OFTEN), run)


@pytest.mark.wide
def test_two_ranks_write_the_rows_of_one(run, model, pairs_dataset, tmp_path, start_ranks):
    command = ["score", pairs_dataset.path, "--model", model.path, "--out", tmp_path / "ranks", *OFTEN]
    finish(start_ranks(2, *command))
    one, two = (StateReader.open(each.state) for each in (run, RunDirectory(tmp_path / "ranks")))
    for column in {*one.fields} - {RANDOM}:  # the last picture of a rank has the first caption of the same rank
        np.testing.assert_allclose(two.column(column), one.column(column), atol=1e-4, err_msg=column)
