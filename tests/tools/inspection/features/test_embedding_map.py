"""The map of the embeddings: which samples are on it, whose encoders put them there, and why there may be none."""

import shutil

import numpy as np
import pytest
import torch

from thermopile.pipeline.views.recipes import RECIPES
from thermopile.tools.inspection import silent
from thermopile.tools.inspection.features import embedding_map as module
from thermopile.tools.inspection.features.embedding_map import embedding_map
from thermopile.tools.inspection.features.run_features import Asked
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures import groups
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.trainer.run_directory import RunDirectory

from support.features import sample_features
from support.written_checkpoints import IMAGE_SIZE, save_encoders
from support.written_runs import train_on, write_run

SIZES = (34, 16, 8, 4, 2, 1)
"""Sizes of the hostile dataset's classes."""


def mapped(run, at="latest", by=("group",)):
    """The map of a run and its notes."""
    inspection = read_run(run, at=at)
    return embedding_map(inspection, survey(inspection, by), silent, Asked()), inspection.notes


@pytest.fixture(scope="module")
def saved_run(hostile_run, hostile_dataset, tmp_path_factory):
    """The hostile run with a checkpoint of its snapshot, and its encoders; copy to change."""
    path = tmp_path_factory.mktemp("mapped") / "run"
    shutil.copytree(hostile_run.path, path)
    run = RunDirectory(path)
    return run, save_encoders(run, hostile_dataset)


@pytest.fixture(scope="module")
def found(saved_run):
    shown, notes = mapped(saved_run[0])
    assert notes == []
    return shown


@pytest.fixture
def own_run(saved_run, tmp_path):
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(saved_run[0].path, run.path)
    return run


@pytest.fixture(scope="module")
def images_run(images_dataset, tmp_path_factory):
    """300 pictures whose tau rises with their ids."""
    run = write_run(tmp_path_factory.mktemp("runs") / "run", images_dataset, {"sample": np.linspace(0.01, 0.3, 300)})
    save_encoders(run, images_dataset)
    return run


def test_pictures_and_captions_lie_in_one_map_each_with_the_tau_of_its_side(found, tau_by_class_size):
    assert found.sample_ids.tolist() == list(range(66))
    assert found.points["image"].tau == pytest.approx(tau_by_class_size)
    assert found.points["text"].tau == pytest.approx(0.15 - tau_by_class_size)
    for points in found.points.values():
        assert points.xy.shape == (66, 2)
        assert points.xy.dtype == np.float32
        assert np.isfinite(points.xy).all()
    assert (found.checkpoint, found.perplexity) == ("step-5", 30)


def test_they_are_the_features_that_the_objective_compares_each_on_its_side(found, saved_run, hostile_dataset):
    run, encoders = saved_run
    view = (RECIPES[run.config().data.recipe], IMAGE_SIZE, torch.device("cpu"))
    pictures, captions = sample_features(encoders, hostile_dataset, found.sample_ids, *view)
    assert found.similarity == pytest.approx((pictures * captions).sum(1).numpy(), abs=1e-6)
    assert np.ptp(found.similarity) > 0
    # Fresh encoders put pictures and captions far apart. Captions take turns in a few texts, pictures are noise.
    xy = np.concatenate([found.points["image"].xy, found.points["text"].xy])
    nearest = (np.linalg.norm(xy[:, None] - xy, axis=2) + np.diag([np.inf] * len(xy))).argmin(1)
    assert ((nearest < 66) == (np.arange(len(xy)) < 66)).all()
    same_text = [np.isclose((captions * captions[near % 66]).sum(1), 1).mean() for near in np.split(nearest, 2)]
    assert same_text[0] < 0.5 < 0.9 < same_text[1]


def test_the_coldest_and_hottest_tenth_of_each_side_are_marked(found):
    for points in found.points.values():
        for marked, rank in ((points.coldest, np.argsort(points.tau, kind="stable")),
                             (points.hottest, np.argsort(-points.tau, kind="stable"))):  # fmt: skip
            assert sorted(np.flatnonzero(marked)) == sorted(rank[:6])


def test_where_there_is_one_tau_alone_nothing_is_marked(hostile_dataset, tmp_path):
    run = write_run(tmp_path / "run", hostile_dataset, {"image": np.full(66, 0.05), "text": np.linspace(0.1, 0.2, 66)})
    save_encoders(run, hostile_dataset)
    points = mapped(run)[0].points
    assert not (points["image"].coldest | points["image"].hottest).any()
    assert points["text"].hottest.sum() == 6


def test_every_class_is_on_the_map_however_rare_and_again_the_same(saved_run, monkeypatch):
    monkeypatch.setattr(module, "MAX_SAMPLES", 24)
    monkeypatch.setattr(module, "MARKED", 0)
    shown, _ = mapped(saved_run[0])
    assert len(shown.sample_ids) == 24
    drawn = np.bincount(shown.colouring.codes[shown.colouring.codes >= 0], minlength=len(SIZES))
    assert (drawn >= np.minimum(SIZES, 2)).all()
    assert drawn[0] > drawn[-1]
    again, _ = mapped(saved_run[0])
    assert again.sample_ids.tolist() == shown.sample_ids.tolist()
    assert np.array_equal(again.points["image"].xy, shown.points["image"].xy)


def test_few_classes_are_coloured_by_name_and_many_by_frequency(found, saved_run, monkeypatch):
    assert len(found.colouring.names) == len(SIZES)
    assert np.bincount(found.colouring.codes + 1).tolist() == [1, *SIZES]
    monkeypatch.setattr(module, "MAX_CLASSES", 5)
    classes = mapped(saved_run[0])[0].colouring
    assert classes.names == ["head classes", "medium classes", "tail classes"]
    assert np.bincount(classes.codes + 1).tolist() == [1, 34 + 16, 8 + 4, 2 + 1]


def test_without_classes_every_level_of_tau_is_on_the_map(images_run, monkeypatch):
    monkeypatch.setattr(module, "MAX_SAMPLES", 40)
    monkeypatch.setattr(module, "MARKED", 5)
    shown, notes = mapped(images_run, by=("caption",))
    assert notes == [
        "The samples have no captions: the dataset holds images only.",
        "No sample has a value in the column caption, so tau cannot be grouped by it.",
    ]
    assert shown.colouring is None
    assert shown.similarity is None
    twentieths = np.bincount(shown.sample_ids // 15)
    assert twentieths[1:-1].tolist() == [2] * 18
    assert shown.points["sample"].coldest.sum() == 5


@pytest.fixture
def few_points(monkeypatch):
    """For what does not depend on where the points lie."""
    monkeypatch.setattr(module, "MAX_SAMPLES", 16)
    monkeypatch.setattr(module, "MARKED", 0)


@pytest.mark.usefixtures("few_points")
def test_the_encoders_are_those_of_the_snapshot_and_where_these_are_gone_the_latest(
    own_run, hostile_dataset, tau_by_class_size
):
    train_on(own_run, {"image": tau_by_class_size, "text": tau_by_class_size}, 9)
    save_encoders(own_run, hostile_dataset, step=9)
    shown, notes = mapped(own_run, at="step-5")
    assert (shown.checkpoint, notes) == ("step-5", [])
    shutil.rmtree(own_run.checkpoints / "step-5")
    shown, (note,) = mapped(own_run, at="step-5")
    assert shown.checkpoint == "step-9"
    assert "No checkpoint belongs to the snapshot step-5" in note


@pytest.mark.usefixtures("few_points")
def test_the_map_shows_averaged_weights_unless_the_raw_ones_are_asked_for(
    hostile_run, hostile_dataset, saved_run, tmp_path
):
    run = RunDirectory(shutil.copytree(hostile_run.path, tmp_path / "run"))
    save_encoders(run, hostile_dataset, ema=0.9)
    inspection = read_run(run)
    averaged, raw = (
        embedding_map(inspection, survey(inspection), silent, Asked(None, weights)) for weights in (None, "raw")
    )
    assert (averaged.weights, raw.weights) == ("averaged", "raw")
    np.testing.assert_array_equal(raw.similarity, mapped(saved_run[0])[0].similarity)
    assert not np.allclose(averaged.similarity, raw.similarity)


def test_progress_tells_of_the_embeddings_and_then_of_the_projection(saved_run):
    inspection, told = read_run(saved_run[0]), []
    embedding_map(inspection, survey(inspection), lambda *at: told.append(at), Asked())
    assert told == [("embeddings", 0, 66), ("embeddings", 66, 66), ("t-SNE", 0, 1), ("t-SNE", 1, 1)]


def no_checkpoint(run):
    shutil.rmtree(run.checkpoints)


def damaged(run):
    (run.checkpoints / "step-5" / "tensors.safetensors").write_bytes(b"")


def of_other_shape(run):
    settings = run.config_file.read_text()
    run.config_file.write_text(settings.replace("dim = 64", "dim = 32"))


def of_unknown_name(run):
    settings = run.config_file.read_text()
    run.config_file.write_text(settings.replace('name = "conv"', 'name = "gone"'))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(no_checkpoint, "no checkpoint yet"), (damaged, "is damaged"), (of_other_shape, "does not contain the encoders"),
     (of_unknown_name, "unknown encoder")],
)  # fmt: skip
def test_without_encoders_there_is_no_map_and_one_line_says_why(own_run, spoil, why):
    spoil(own_run)
    shown, (note,) = mapped(own_run)
    assert shown is None
    assert note.startswith("There is no map of the embeddings: ")
    assert why in note
    assert "\n" not in note


@pytest.mark.parametrize(("value", "why"), [(0.0, "the same features"), (float("nan"), "not finite")])
def test_encoders_that_tell_no_samples_apart_make_no_map(own_run, hostile_dataset, value, why):
    def change(weights):
        for tensor in weights.values():
            tensor.fill_(value)

    save_encoders(own_run, hostile_dataset, change=change)
    shown, (note,) = mapped(own_run)
    assert shown is None
    assert why in note


def test_without_pictures_there_is_no_map(own_run, hostile_dataset, tmp_path):
    path = tmp_path / "dataset"
    shutil.copytree(hostile_dataset.path, path)
    settings = own_run.config_file.read_text()
    own_run.config_file.write_text(settings.replace(str(hostile_dataset.path), str(path)))
    beton = path / "shards" / "shard-00000.beton"
    beton.write_bytes(beton.read_bytes()[:1000])
    shown, (note,) = mapped(own_run)
    assert shown is None
    assert "Convert the dataset again" in note
    shutil.rmtree(path)
    shown, notes = mapped(own_run)
    assert shown is None
    assert "There is no map of the embeddings: features need the run's dataset; pass its path with --data" in notes


def test_a_column_of_too_many_values_colours_nothing(images_run, monkeypatch):
    monkeypatch.setattr(groups, "MAX_GROUPS", 5)
    assert mapped(images_run, by=("uri",))[0].colouring is None
    assert len(mapped(images_run)[0].colouring.names) == 2


def test_without_temperatures_the_map_is_of_classes_alone(hostile_dataset, tmp_path):
    run = write_run(tmp_path / "without", hostile_dataset, {}, objective="sogclr")
    save_encoders(run, hostile_dataset)
    shown, notes = mapped(run)
    assert not any("no map" in note for note in notes)
    assert list(shown.points) == ["image", "text"]
    for points in shown.points.values():
        assert points.tau is None
        assert not (points.coldest | points.hottest).any()
    assert np.bincount(shown.colouring.codes + 1).tolist() == [1, *SIZES]
    by_caption, _ = mapped(run, by=("caption",))
    assert (by_caption.colouring.word, by_caption.colouring.names != shown.colouring.names) == ("caption", True)


def test_with_too_few_samples_there_is_no_map(hostile_dataset, tmp_path):
    taus = {"image": np.full(66, 0.05), "text": np.full(66, 0.05)}
    few = write_run(tmp_path / "few", hostile_dataset, taus, visited=np.arange(66) < 15)
    shown, (*_, note) = mapped(few)
    assert shown is None
    assert "it needs 16 visited samples, but there are only 15" in note
