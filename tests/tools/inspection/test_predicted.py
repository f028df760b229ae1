"""Temperatures that a run of TempNet predicts for datasets that it was not trained on."""

import json
import shutil
import tempfile

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.tokenizer import load_tokenizer
from thermopile.tools.inspection.reading import predicted
from thermopile.trainer.evaluation.features import image_features, restore_encoders, text_features
from thermopile.trainer.run.build import objective_of, recipe_named
from thermopile.trainer.run_directory import RunDirectory, find_checkpoint, load_found

from support.cli import answer, cli, sets, succeed

TEMPNET = ["objective.name=tempnet", "objective.eta=0.01", "objective.prototypes=8", "optimizer.warmup_steps=0"]


def inspect(*words):
    done = succeed("inspect", *words)
    return done


def trained_on(dataset, out, *settings):
    words = sets(*TEMPNET, *settings)
    succeed("train", "--data", dataset.path, "--out", out, *words)
    return RunDirectory(out)


def exported(run_directory, data, to, *words):
    inspect(run_directory.path, "--data", data.path, "--export", to, *words)
    return pq.read_table(to)


@pytest.fixture(scope="module")
def trained(pairs_dataset, tmp_path_factory):
    """14 steps on pairs: checkpoints at 7 and 14."""
    settings = ("epochs=2", "data.image_size=16", "model.dim=8", "checkpoint.every_steps=7", "objective.tau_max=0.2")
    return trained_on(pairs_dataset, tmp_path_factory.mktemp("predicting") / "run", *settings)


@pytest.fixture(scope="module")
def on_images(images_dataset, tmp_path_factory):
    """Two epochs on pictures, with an encoder of the user's own."""
    settings = (
        "epochs=2",
        "batch_size=64",
        "data.image_size=16",
        "model.dim=8",
        "model.image.name=support.own_code:Tower",
    )
    return trained_on(images_dataset, tmp_path_factory.mktemp("predicting") / "images", *settings)


def parts_of(run_directory, dataset):
    """Encoders and objective of the run's last checkpoint; dataset: its own."""
    config, checkpoint = run_directory.config(), find_checkpoint(run_directory, "latest")
    training, objective = load_found(checkpoint)[1], objective_of(config)
    objective.load_state_dict(training["objective"])
    made = restore_encoders(config, checkpoint, training, dataset.index.tokenizer, "raw", allow_code=True)
    return config, made, objective


def test_every_sample_has_the_tau_of_its_picture_and_of_its_first_caption(
    trained, pairs_dataset, captions_dataset, tmp_path
):
    rows = exported(trained, captions_dataset, tmp_path / "rows.parquet")
    config, encoders, objective = parts_of(trained, pairs_dataset)
    recipe, cpu = recipe_named(config.data.recipe), torch.device("cpu")
    pictures = image_features(encoders.image, captions_dataset, recipe, 16, cpu, lambda done, total: None)
    length, texts = pairs_dataset.index.tokenizer.context_length, captions_dataset.column("caption").to_pylist()
    tokenizer = load_tokenizer(pairs_dataset.tokenizer_path, context_length=length)
    captions = text_features(encoders.text, tokenizer, texts, cpu, lambda done, total: None)
    for side, features in (("image", pictures), ("text", captions)):
        expected = objective.predict(side, features).numpy()
        assert np.unique(expected).size > 100
        np.testing.assert_allclose(rows[f"{side}/tau"].to_numpy(), expected, rtol=1e-5)
    assert rows["sample_id"].to_pylist() == list(range(captions_dataset.n))
    assert rows["caption"].to_pylist() == captions_dataset.column("caption").to_pylist()


def test_an_export_has_no_counters_and_says_who_predicted(trained, captions_dataset, tmp_path):
    rows = exported(trained, captions_dataset, tmp_path / "rows.parquet", "--at", "step-7")
    assert not {"visits", "last_step", "image/log_s"} & set(rows.column_names)
    said = {key.decode(): value.decode() for key, value in rows.schema.metadata.items() if key.startswith(b"thermo")}
    assert said["thermopile.predicted_by"] == "step-7"
    assert said["thermopile.dataset_fingerprint"] == captions_dataset.index.fingerprint
    assert "thermopile.snapshot" not in said


def test_rows_in_blocks_are_those_of_one_block(trained, captions_dataset, tmp_path, monkeypatch):
    whole = exported(trained, captions_dataset, tmp_path / "whole.parquet")
    monkeypatch.setattr(predicted, "ROWS_AT_ONCE", 256)
    assert exported(trained, captions_dataset, tmp_path / "parts.parquet") == whole


def test_a_dataset_of_pictures_has_the_tau_of_the_images_only(trained, images_dataset, tmp_path):
    seen = answer("inspect", trained.path, "--data", images_dataset.path)
    assert list(seen["sides"]) == ["image"]
    assert seen["samples"] == images_dataset.n


@pytest.mark.wide
def test_the_terminal_and_the_page_say_that_nothing_was_trained(trained, captions_dataset, tmp_path):
    (trained.report).mkdir(exist_ok=True)
    (trained.report / "report.html").write_text("the run's own")
    done = inspect(trained.path, "--data", captions_dataset.path)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "predicted by step-14; the run was not trained on this dataset" in lines
    assert "samples 512" in lines
    assert f"dataset {captions_dataset.path}" in lines
    assert "predicted tau image text" in lines
    assert not [line for line in lines if "visit" in line or "snapshot" in line]
    assert done.stdout.splitlines()[-1] == str(trained.report / "predicted_report.html")
    page = (trained.report / "predicted_report.html").read_text("utf-8")
    assert "Temperatures predicted by" in page
    assert "Predicted, not trained." in page
    assert "512 samples, predicted by step-14 and never trained on, tempnet" in page
    assert "Through time" not in page
    assert (trained.report / "report.html").read_text() == "the run's own"


def test_json_has_the_checkpoint_and_neither_snapshot_nor_visits(trained, captions_dataset):
    seen = answer("inspect", trained.path, "--data", captions_dataset.path)
    assert (seen["predicted_by"], seen["snapshot"], seen["through_time"]) == ("step-14", None, None)
    assert [seen[key] for key in ("visits", "staleness_steps", "share_visited", "never_visited")] == [None] * 4
    assert seen["dataset"] == str(captions_dataset.path)
    assert 0.005 < seen["sides"]["text"]["tau"]["min"] < seen["sides"]["text"]["tau"]["max"] < 0.2
    assert "which the run was not trained on, by step-14" in seen["notes"][0]


def test_a_sample_has_its_predicted_tau_and_no_history(trained, captions_dataset):
    done = inspect(trained.path, "--data", captions_dataset.path, "--sample", 3, "--json")
    (sample,) = json.loads(done.stdout)["samples"]
    assert set(sample["state"]) == {"image/tau", "text/tau"}
    assert sample["history"] == []
    assert 0 <= sample["share_with_lower_tau"]["image"] <= 1
    lines = inspect(trained.path, "--data", captions_dataset.path, "--sample", 3).stdout.splitlines()
    assert lines[-1] == str(trained.report / "predicted_samples.html")


def test_the_runs_own_dataset_elsewhere_is_inspected_and_not_predicted(trained, pairs_dataset, tmp_path):
    moved = shutil.copytree(pairs_dataset.path, tmp_path / "moved")
    seen = answer("inspect", trained.path, "--data", moved)
    assert (seen["predicted_by"], seen["snapshot"]["tag"]) == (None, "step-14")


def test_images_are_predicted_by_a_run_on_images_with_code_of_the_users_own(on_images, captions_dataset, tmp_path):
    refused = cli("inspect", on_images.path, "--data", captions_dataset.path)
    assert refused.exit_code == 2
    assert "sets model.image.name = 'support.own_code:Tower'" in refused.stderr
    assert "add --allow-code" in refused.stderr
    rows = exported(on_images, captions_dataset, tmp_path / "rows.parquet", "--allow-code")
    _, encoders, objective = parts_of(on_images, captions_dataset)
    recipe = recipe_named(on_images.config().data.recipe)
    features = image_features(
        encoders.image, captions_dataset, recipe, 16, torch.device("cpu"), lambda done, total: None
    )
    np.testing.assert_allclose(rows["sample/tau"].to_numpy(), objective.predict("sample", features), rtol=1e-5)


def test_a_run_that_does_not_predict_refuses_another_dataset_and_names_what_does(hostile_run, flat_dataset):
    done = cli("inspect", hostile_run.path, "--data", flat_dataset.path)
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert "is not the dataset that the run was trained on" in done.stderr
    assert "can only be predicted, by a run of tempnet" in done.stderr


@pytest.mark.parametrize("words", [("--map",), ("--against", "step-7")])
def test_map_and_comparison_are_refused(trained, captions_dataset, words):
    done = cli("inspect", trained.path, "--data", captions_dataset.path, *words)
    assert done.exit_code == 2
    assert "predicting temperatures" not in done.stderr
    assert f"{words[0]} is for the dataset that the run was trained on" in done.stderr.splitlines()[-1]


def test_allow_code_without_effect_is_refused(trained):
    done = cli("inspect", trained.path, "--allow-code", "--export", "rows.csv")
    assert done.exit_code == 2
    assert "--allow-code has no effect with --export that needs no encoders" in done.stderr


def test_captions_need_the_own_dataset_of_a_run_of_an_earlier_version_for_its_tokenizer(
    trained, captions_dataset, tmp_path
):
    away = shutil.copytree(trained.path, tmp_path / "run", ignore=shutil.ignore_patterns("trained_on.json"))
    recorded = trained.config().data.path
    settings = (away / "config.toml").read_text().replace(recorded, str(tmp_path / "gone"))
    (away / "config.toml").write_text(settings)
    done = cli("inspect", away, "--data", captions_dataset.path)
    assert done.exit_code == 1
    assert "the tokenizer of the run's dataset is needed" in done.stderr
    assert f"{tmp_path / 'gone'}" in done.stderr
    assert "--data" not in done.stderr.splitlines()[-1]


def test_a_picture_that_does_not_decode_is_named_and_nothing_is_left_behind(
    trained, captions_dataset, tmp_path, monkeypatch
):
    broken = shutil.copytree(captions_dataset.path, tmp_path / "broken")
    shard = broken / "shards" / "shard-00000.beton"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    shard.write_bytes(content)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    done = cli("inspect", trained.path, "--data", broken)
    assert done.exit_code == 1
    assert str(broken) in done.stderr.splitlines()[-1]
    assert "snapshot" not in done.stderr.splitlines()[-1]
    inspect(trained.path, "--data", captions_dataset.path, "--json")
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_missing_dataset_is_one_error(trained, tmp_path):
    with pytest.raises(DatasetError, match="is not a dataset"):
        predicted.other_dataset(trained, tmp_path, allow_code=False)
