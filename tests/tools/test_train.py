"""`thermopile train`: what is asked of a new run, and of one that goes on."""

import re
import shutil
import tomllib
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModel, ResNetConfig

from thermopile.trainer.run_directory import RunDirectory

from support.cli import answer, assert_one_line, cli, sets, succeed
from support.datasets import change_content, named_ids
from support.runs import weights

train = partial(cli, "train")

TINY = ("epochs=1", "batch_size=256", "data.image_size=16", "model.dim=8", "model.image.config.width=4",
        "objective.name=isogclr")  # fmt: skip


def refused(result, *words):
    assert_one_line(result, 2, *words)


@pytest.fixture(scope="module")
def started(pairs_dataset, tmp_path_factory):
    """A run, and what `train` printed."""
    out = tmp_path_factory.mktemp("runs") / "run"
    result = succeed("train", "--data", pairs_dataset.path, "--out", out, *sets(*TINY))
    return out, result


@pytest.fixture
def finished(started, tmp_path):
    """A run of one epoch, 7 steps, for one test alone."""
    return shutil.copytree(started[0], tmp_path / "run")


def test_a_run_begins_with_a_line_of_what_it_trains(started, pairs_dataset):
    run, result = started
    first, *_, last = result.stderr.splitlines()
    parameters = sum(each.numel() for each in weights(RunDirectory(run)).values())
    assert re.fullmatch(
        rf"{run}: 2,000 pairs from {pairs_dataset.path}, (cpu|cuda.*), {parameters:,} encoder parameters, "
        "7 steps in 1 epoch, 208 samples not drawn in an epoch",
        first,
    )
    for words in ("training: 7/7 loss", "tau", "samples/s", "data wait", "store wait"):
        assert words in last
    assert "trained 7 steps" in result.stdout


def test_a_run_may_end_after_some_steps_and_go_on_to_more_where_that_is_allowed(pairs_dataset, tmp_path):
    run = tmp_path / "run"
    done = succeed("train", "--data", pairs_dataset.path, "--out", run, *sets(*TINY), "--steps", 3)
    assert "3 steps in 1 epoch" in done.stderr
    assert "trained 3 steps" in done.stdout
    assert answer("status", run)["total_steps"] == 3
    assert "nothing to do" in succeed("train", "--out", run, "--resume").stdout
    refused(train("--out", run, "--resume", "--steps", 9), "steps: the run has 3, asked for 9", "--allow-change steps")
    more = succeed("train", "--out", run, "--resume", "--steps", 9, "--allow-change", "steps")
    assert "trained 7 steps" in more.stdout  # all that the epoch has


# Looking first


def test_print_config_shows_a_preset_without_data_and_run_directory():
    result = succeed("train", "--preset", "isogclr/cifar100", "--print-config", *sets("epochs=3"))
    shown = tomllib.loads(result.stdout)
    assert (shown["epochs"], shown["objective"]["rho"], shown["data"]["recipe"]) == (3, 0.4, "simclr")
    assert "# preset isogclr/cifar10\n" in result.stdout


def test_print_config_resolves_with_data_and_starts_nothing(pairs_dataset, tmp_path):
    (tmp_path / "own.toml").write_text("log_every = 3")
    result = train("--data", pairs_dataset.path, "--config", tmp_path / "own.toml", "--out", tmp_path / "run",
                   "--print-config")  # fmt: skip
    assert tomllib.loads(result.stdout)["objective"]["mode"] == "bimodal"
    assert f"log_every = 3 # --config {tmp_path}/own.toml" in " ".join(result.stdout.split())
    assert [path.name for path in tmp_path.iterdir()] == ["own.toml"]


def test_print_config_on_resume_shows_what_the_run_has_and_what_would_change(finished):
    before = (finished / "config.toml").read_bytes()
    result = train("--out", finished, "--resume", "--print-config", "--allow-change", "epochs", *sets("epochs=2"))
    words = " ".join(result.stdout.split())
    assert "epochs = 2 # --set" in words
    assert f"batch_size = 256 # {finished}/config.toml" in words
    assert "epochs: 1 → 2" in result.stderr
    assert (finished / "config.toml").read_bytes() == before


def test_a_run_without_a_directory_is_wrong_usage(pairs_dataset):
    refused(train("--data", pairs_dataset.path), "Missing option '--out'")


# Going on with other settings


def test_resuming_with_the_settings_it_was_started_with_is_no_change(finished, pairs_dataset):
    again = sets("epochs=1", "data.recipe=auto", "objective.mode=auto", "order.canonical_shards=0")
    succeed("train", "--out", finished, "--resume", "--data", pairs_dataset.path, *again)


def test_resuming_with_another_dataset_is_refused_naming_both(finished, captions_dataset, images_dataset):
    for other in (captions_dataset, images_dataset):  # the run is on pairs
        said = f"{other.path} is not the dataset of {finished}; pass that one's place with --data"
        refused(train("--out", finished, "--resume", "--data", other.path), said)


def test_resuming_with_other_settings_is_refused_naming_those_that_may_not_change(finished):
    result = train("--out", finished, "--resume", *sets("optimizer.lr=0.5", "log_every=2"))
    refused(result, "optimizer.lr: the run has 0.001, asked for 0.5")
    assert "log_every" not in result.stderr


def test_samples_to_leave_out_of_a_run_that_has_begun_are_for_a_fork(finished, tmp_path):
    pq.write_table(pa.table({"sample_id": [3]}), tmp_path / "withdrawn.parquet")
    result = train("--out", finished, "--resume", "--without", tmp_path / "withdrawn.parquet")
    refused(result, "data.without", "thermopile fork RUN --out NEW --without FILE")


def test_a_resume_that_is_refused_says_nothing_of_changed_settings(finished, captions_dataset):
    asked = ("--out", finished, "--resume", *sets("epochs=2"), "--allow-change", "epochs")
    (finished / "trained_on.json").unlink()  # so that only the state tells the datasets apart
    result = train(*asked, "--data", captions_dataset.path)
    refused(result, "dataset fingerprint: the store has")
    assert "the settings have changed" not in result.output
    assert "the settings have changed" in succeed("train", *asked).stderr


def test_a_jump_of_the_learning_rate_is_told(pairs_dataset, tmp_path):
    run = tmp_path / "run"
    succeed("train", "--data", pairs_dataset.path, "--out", run, *sets(*TINY, "optimizer.warmup=0"))
    asked = ("--out", run, "--resume", *sets("epochs=2"), "--allow-change", "epochs")
    said = "epochs: 1 → 2; the learning rate of the next step is 0.0005, not 0\n"
    assert said in succeed("train", *asked, "--dry-run").stderr
    assert said in succeed("train", *asked).stderr
    assert "learning rate of" not in succeed("train", *asked[:3], *sets("epochs=1"), *asked[-2:]).stderr  # it has ended


def test_a_dataset_to_score_that_was_moved_is_named_with_its_setting(pairs_dataset, tmp_path):
    asked = sets("evaluation.every_steps=4", "evaluation.test=/nowhere/set")
    result = train("--data", pairs_dataset.path, "--out", tmp_path / "run", *sets(*TINY), *asked)
    assert_one_line(result, 1, "evaluation.test: /nowhere/set does not exist", "--set evaluation.test=DATASET")


def test_a_batch_larger_than_the_dataset_is_refused_with_one_that_fits(images_dataset, tmp_path):
    asked = ("--data", images_dataset.path, "--out", tmp_path / "run")
    refused(train(*asked, *sets("batch_size=512")), "batch_size 512 exceeds 300 samples; lower it to 64")


def test_an_allowed_change_is_made_shown_and_recorded(finished):
    refused(train("--out", finished, "--resume", *sets("epochs=2")), "--allow-change epochs")
    result = succeed("train", "--out", finished, "--resume", *sets("epochs=2"), "--allow-change", "epochs")
    assert "epochs: 1 → 2" in result.stderr
    assert "trained 14 steps" in result.stdout
    assert RunDirectory(finished).config().epochs == 2


def test_a_run_that_is_past_its_new_end_is_finished(finished):
    train("--out", finished, "--resume", *sets("epochs=2"), "--allow-change", "epochs")
    result = train("--out", finished, "--resume", *sets("epochs=1"), "--allow-change", "epochs")
    assert "finished at step 14; nothing to do" in result.stdout


def test_a_run_from_before_a_setting_goes_on_with_its_default(finished):
    config = finished / "config.toml"
    newer = ("similarity_budget", "precision", "log_every", "grad_clip")
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if not line.startswith(newer)))
    succeed("train", "--out", finished, "--resume", "--accept-config")
    refused(train("--out", finished, "--resume", *sets("objective.grad_clip=1")),
            "objective.grad_clip: the run has 5.0, asked for 1")  # fmt: skip


def test_the_preset_that_a_run_was_started_with_is_no_change_and_another_is(pairs_dataset, tmp_path):
    line = ("--preset", "glyphs", "--data", pairs_dataset.path, "--out", tmp_path / "run", "--resume",
            *sets("epochs=1", "data.image_size=16", "optimizer.lr=0.002", "optimizer.warmup=3"))  # fmt: skip
    assert train(*line).exit_code == 0
    again = train(*line)
    assert "finished at step 7" in again.stdout, again.stderr
    refused(train("--preset", "glyphs", "--out", tmp_path / "run", "--resume"), "epochs: the run has 1, asked for 20",
            "optimizer.lr: the run has 0.002, asked for 0.001")  # fmt: skip


# Starting from a local model, or from another run


def test_a_run_from_a_local_model_goes_on_with_its_own_line_once_the_model_is_gone(
    pairs_dataset, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    model = ResNetConfig(layer_type="basic", embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1])
    AutoModel.from_config(model).save_pretrained("model")
    line = ("--data", pairs_dataset.path, "--out", "new", "--resume",
            *sets("epochs=1", "data.image_size=16", "model.dim=8", "model.image.name=hf:./model"))  # fmt: skip
    assert train(*line).exit_code == 0
    shutil.rmtree("model")
    again = train(*line)
    assert "finished at step 7" in again.stdout, again.stderr
    refused(train(*line, *sets("model.image.config.depths=[2, 2]")), "model.image.config.depths", "cannot change")


def test_a_new_run_starts_from_the_weights_of_another_and_records_which(finished, pairs_dataset, tmp_path):
    out = tmp_path / "new"
    line = ("--data", pairs_dataset.path, "--out", out, "--init-from", finished, *sets(*TINY, "optimizer.lr=1e-12"))
    succeed("train", *line)
    assert RunDirectory(out).config().init.run == f"{finished}@step-7"
    before, after = weights(RunDirectory(finished)), weights(RunDirectory(out))
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[name], before[name], atol=1e-6) for name in before)
    # A job script's line, given again.
    assert "finished at step 7" in train(*line, "--resume").stdout
    refused(train(*line), "--resume")


def test_a_run_that_has_begun_is_not_started_from_other_weights(finished):
    refused(train("--out", finished, "--resume", "--init-from", finished), "init.run: the run has ''",
            "cannot change: the run continues with its own weights")  # fmt: skip


def test_a_rho_that_can_never_bind_gives_a_warning(hostile_dataset, tmp_path):
    command = ("--data", hostile_dataset.path, *sets(*TINY, "batch_size=32", "order.canonical_shards=2"))
    high = train(*command, "--out", tmp_path / "high", *sets("objective.rho=3.5"))
    assert "Warning: rho 3.5 is not below log(31 negatives) = 3.43: it may never bind" in high.stderr
    low = train(*command, "--out", tmp_path / "low", *sets("objective.rho=3.4"))
    assert (low.exit_code, "it may never bind" in low.stderr) == (0, False)


def test_weights_that_do_not_fit_start_no_run(finished, pairs_dataset, tmp_path):
    line = ("--data", pairs_dataset.path, "--out", tmp_path / "new", "--init-from", finished)
    refused(train(*line, *sets(*TINY, "model.dim=16")), "image.", "there, but", "in this run")
    assert not (tmp_path / "new").exists()


def test_a_caption_too_frequent_for_rho_is_warned_of_unless_samples_are_selected(pairs_dataset, tmp_path):
    data = shutil.copytree(pairs_dataset.path, tmp_path / "data")
    change_content(data, pairs_dataset.index.content.model_dump() | {"with_caption": 380, "caption_sample": 17})
    pq.write_table(pa.table({"sample_id": np.arange(1_000)}), tmp_path / "kept.parquet")
    command = ("--data", data, *sets(*TINY))
    whole, lower, selected = (
        train(*command, "--out", tmp_path / name, *more)
        for name, more in (("whole", sets("objective.rho=2")), ("lower", sets("objective.rho=1.6")),
                           ("selected", ("--select", tmp_path / "kept.parquet", *sets("objective.rho=2"))))
    )  # fmt: skip
    (warning,) = [line for line in (tmp_path / "whole" / "warnings.log").read_text().splitlines() if "crowded" in line]
    assert "19.0% of the dataset's samples have the caption of sample 17, more than exp(-rho) = 13.5%: " in warning
    assert "crowded" in whole.stderr
    for quiet in (lower, selected):
        assert quiet.exit_code == 0, quiet.stderr
        assert "crowded" not in quiet.stderr


def test_a_run_on_selected_weighted_samples_refuses_other_files(pairs_dataset, tmp_path):
    ids = np.arange(1, 2_000, 2)
    pq.write_table(pa.table({"sample_id": ids, "weight": ids % 3}), tmp_path / "kept.parquet")
    pq.write_table(pa.table({"sample_id": ids + 0, "weight": ids % 4}), tmp_path / "other.parquet")
    pq.write_table(named_ids(pairs_dataset, ids[::9]), tmp_path / "gone.parquet")
    command = ("--data", pairs_dataset.path, "--out", tmp_path / "run", *sets(*TINY), "--resume")
    kept, gone = tmp_path / "kept.parquet", tmp_path / "gone.parquet"
    files = ("--select", kept, "--weights", kept, "--without", gone)
    begun = succeed("train", *command, *files)
    said = f"run: 1,000 selected of 2,000 pairs from {pairs_dataset.path}, with weights, without those of data.without"
    assert f"{said}, cpu" in begun.stderr
    assert "3 steps in 1 epoch" in begun.stderr
    assert "finished at step 3; nothing to do" in train(*command, *files).stdout
    assert "finished at step 3; nothing to do" in train(*command).stdout
    for option in ("select", "weights", "without"):
        refused(
            train(*command, f"--{option}", tmp_path / "other.parquet"), f"data.{option}: the run has", "its own copy"
        )
    refused(
        train(*command[:2], "--out", tmp_path / "new", "--select", tmp_path / "none.parquet"),
        "--select", "none.parquet cannot be read: No such file or directory",
    )  # fmt: skip
    said = cli("status", tmp_path / "run").stdout
    assert re.search(r"samples +888 selected of 2,000, visited \d+% at the last snapshot", said)
    assert cli("state", "check", tmp_path / "run").exit_code == 0
