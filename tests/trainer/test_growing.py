"""A run that starts from another one's weights and state, after samples were appended to the dataset."""

import shutil

import numpy as np
import pytest

from thermopile.pipeline.opening import Dataset
from thermopile.state_store.reader import StateReader
from thermopile.trainer.run_directory import RunDirectory

from support.cli import cli, sets, succeed
from support.conversions import append_glyphs

TINY = (
    "epochs=1", "batch_size=64", "data.image_size=16", "data.workers=1", "checkpoint.every_minutes=0", "model.dim=16",
    "model.image.config.width=4", "model.text.config.width=8",
)  # fmt: skip
ADDED = np.arange(0, 10_847, 54)


def train(*words, **settings):
    return cli("train", *words, *sets(*TINY, *(f"{key}={value}" for key, value in settings.items())))


@pytest.fixture(scope="module")
def grown(pairs_dataset, tmp_path_factory):
    """2,000 pairs, and the same with 201 appended."""
    folder = tmp_path_factory.mktemp("grown")
    before, after = (shutil.copytree(pairs_dataset.path, folder / name) for name in ("before", "after"))
    append_glyphs(after, ADDED)
    return before, after


@pytest.fixture(scope="module")
def run(grown, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "before"
    assert train("--data", grown[0], "--out", out).exit_code == 0
    return out


@pytest.fixture(scope="module")
def after(grown, run, tmp_path_factory):
    """A run on the grown dataset from the one before, with all rows in memory."""
    out = tmp_path_factory.mktemp("runs") / "after"
    assert train("--data", grown[1], "--out", out, "--init-from", run, "--grow").exit_code == 0
    return out


def test_the_first_samples_keep_their_state_and_the_others_begin_at_initial_values(grown, run, after):
    old, new = StateReader.open(run / "state"), StateReader.open(after / "state", at="step-0")
    assert (old.samples, new.samples) == (2000, 2201) == (2000, Dataset(grown[1]).n)
    carried, fresh = new.rows(0, 2000), new.rows(2000, 2201)
    for name, values in old.rows(0, 2000, [*old.fields, "visits"]).items():
        assert carried[name].tobytes() == values.tobytes()
    assert carried["visits"].sum() > 1900
    assert all((fresh[name] == np.float32(new.initial[name])).all() for name in new.fields)
    assert (fresh["visits"] == 0).all()
    assert (carried["last_step"] == 0).all()


def assert_an_epoch_was_counted_on_top(run, after):
    visits, before = (StateReader.open(each / "state").column("visits") for each in (after, run))
    assert set((visits[:2000] - before).tolist()) <= {0, 1}
    assert set(visits[2000:].tolist()) <= {0, 1}
    steps, rest = divmod(int(visits.sum() - before.sum()), 64)
    assert (rest, steps > 30) == (0, True)  # an epoch through a window may be a little shorter


def test_training_goes_on_from_the_carried_rows(run, after):
    assert_an_epoch_was_counted_on_top(run, after)


@pytest.mark.wide
def test_training_goes_on_from_the_carried_rows_through_a_window(grown, run, tmp_path):
    few = {"state.memory_budget": 40_000, "order.canonical_shards": 2}
    result = train("--data", grown[1], "--out", tmp_path / "run", "--init-from", run, "--grow", **few)
    assert result.exit_code == 0, result.stderr
    recorded = RunDirectory(tmp_path / "run").config()
    assert recorded.order.blocks_per_shard > recorded.order.window_blocks > 1
    assert_an_epoch_was_counted_on_top(run, tmp_path / "run")


def test_a_grown_state_is_sound(after):
    succeed("state", "check", after, "--all")


def test_a_dataset_that_did_not_grow_from_the_runs_is_refused(run, tmp_path, grown):
    other = shutil.copytree(grown[0], tmp_path / "other")
    append_glyphs(other, ADDED[:50])
    second = tmp_path / "second"
    assert train("--data", other, "--out", second, batch_size=512).exit_code == 0
    refused = train("--data", grown[1], "--out", tmp_path / "run", "--init-from", second, "--grow")
    assert refused.exit_code == 2
    assert "did not grow from the dataset of" in refused.stderr


@pytest.mark.parametrize(
    ("words", "settings", "reason"),
    [
        ((), {}, "Error: init: state (--grow) needs init.run"),
        (("--init-from", "{run}"), {"objective.name": "sogclr"}, "use that run's objective"),
    ],
)
def test_what_cannot_be_carried_is_refused(grown, run, tmp_path, words, settings, reason):
    words = [word.format(run=run) for word in words]
    refused = train("--data", grown[1], "--out", tmp_path / "run", *words, "--grow", **settings)
    assert refused.exit_code == 2
    assert reason in refused.stderr
