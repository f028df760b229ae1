"""Runs on a mixture of datasets, and what the commands say of them."""

import shutil
import tomllib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.opening import Dataset, Mixture
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.state_store.reader import StateReader
from thermopile.tools.inspection.opened_run import open_run
from thermopile.trainer.config import StateConfig, load_config, to_tree
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import create_order, objective_of, resolve
from thermopile.trainer.run_directory import RunDirectory

from support.cli import answer, assert_one_line, cli, sets, succeed
from support.mixtures import made_parts
from support.runs import SMALL_MODEL, assert_same_run, finish, kill, losses, resumed, stop_at, stopped, train, wait_for


@pytest.fixture(scope="module")
def parts(pairs_dataset, tmp_path_factory):
    return made_parts(pairs_dataset, tmp_path_factory.mktemp("parts"), 900, 400, 300)


def mixed(parts, **more):
    """Settings of 34 steps, more than an epoch: of a batch of 64, 32 : 16 : 16 are of the parts."""
    data = {"parts": [str(part.path) for part in parts], "shares": [2, 1, 1], "image_size": 16}
    tree = {"epochs": 2, "steps": 34, "batch_size": 64, "log_every": 1, "model": SMALL_MODEL, "data": data}
    return resolve(load_config(tree | {"checkpoint": {"every_steps": 5}} | more), Mixture(parts))[0]


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    """A finished run with every row in memory."""
    return train(mixed(parts), tmp_path_factory.mktemp("runs") / "whole")


def visits_by_hand(config, parts):
    """How often each sample is in the run's batches."""
    order = create_order(config.model_copy(update={"state": StateConfig()}), Mixture(parts), objective_of(config))
    visits = np.zeros(sum(part.n for part in parts), int)
    for step in range(config.total_steps(order.steps_per_epoch)):
        visits[order.rows.ids_at(order.batch_ids(*divmod(step, order.steps_per_epoch)))] += 1
    return visits


def test_visits_are_counted_exactly_for_every_part(whole, parts):
    state, visits = StateReader.open(whole.state), visits_by_hand(whole.config(), parts)
    of_parts = np.split(visits, [900, 1_300])
    assert [of_part.sum() for of_part in of_parts] == [34 * 32, 34 * 16, 34 * 16]
    assert [of_part.max() for of_part in of_parts] == [2, 2, 2]
    np.testing.assert_array_equal(state.column("visits"), visits)
    ids = np.array([1_599, 3, 900, 899, 1_300])
    np.testing.assert_array_equal(state.rows_at(ids)["visits"], visits[ids])
    np.testing.assert_array_equal(state.array("visits")[880:1_310], visits[880:1_310])
    assert state.array("visits")[1_300] == visits[1_300]
    assert (state.samples, state.kept) == (1_600, 1_600)


@pytest.mark.wide
def test_a_stopped_run_repeats_its_losses_bit_for_bit(whole, parts, tmp_path):
    run = stopped(mixed(parts), tmp_path / "run", 32)
    assert_same_run(resumed(mixed(parts), run, from_step=30), whole)


@pytest.mark.wide
def test_a_windowed_run_is_stopped_and_counts_exactly(parts, tmp_path):
    config, run = mixed(parts, state={"memory_budget": "20KB"}), RunDirectory(tmp_path / "run")
    assert config.order.window_blocks < config.order.blocks_per_shard
    with pytest.raises(KeyboardInterrupt), Trainer.open(config, run) as trainer:
        trainer.train(stop_at(32))
    with Trainer.open(config, run, resume=True) as trainer:
        assert trainer.run.steps_done == 30
        trainer.train()
        assert trainer.run.store.blocks_read < 2 * len(trainer.run.order.rows.blocks) * 15  # it was told the windows
    np.testing.assert_array_equal(StateReader.open(run.state).column("visits"), visits_by_hand(config, parts))


def test_pictures_captions_and_tables_are_those_of_the_parts(parts):
    mixture, ids = Mixture(parts), np.array([1_500, 7, 950])
    own = [parts[2].rows([200])[0], parts[0].rows([7])[0], parts[1].rows([50])[0]]
    names = ["rare", "glyphs", "glyphs-2"]
    expected = [
        row | {"sample_id": id, "part": name, "id_in_part": row["sample_id"]}
        for row, id, name in zip(own, ids.tolist(), names, strict=True)
    ]
    assert mixture.rows(ids.tolist()) == expected
    assert mixture.jpeg(1_500) == parts[2].jpeg(200)
    tables = [*mixture.tables(["part", "caption"], 700)]
    assert [len(table) for table in tables] == [700, 700, 200]
    assert pa.concat_tables(tables)["caption"].to_pylist() == mixture.column("caption").to_pylist()
    assert mixture.column("part").value_counts().to_pylist() == [
        {"values": "glyphs", "counts": 900}, {"values": "glyphs-2", "counts": 400}, {"values": "rare", "counts": 300},
    ]  # fmt: skip
    assert Mixture(parts[::-1]).index.fingerprint != mixture.index.fingerprint


@pytest.mark.wide
def test_commands_know_the_parts_by_name(whole, tmp_path):
    state = StateReader.open(whole.state)
    tau = np.split(np.where(state.column("visits") > 0, state.column("image/tau"), np.nan), [900, 1_300])
    found = {of["part"]: of for of in answer("inspect", whole.path)["parts"]}
    assert {name: of["samples"] for name, of in found.items()} == {"glyphs": 900, "glyphs-2": 400, "rare": 300}
    assert [of["mean_tau"]["image"] for of in found.values()] == pytest.approx([np.nanmean(of) for of in tau])
    assert "mean tau (image)" in succeed("inspect", whole.path).output
    status = answer("status", whole.path)
    assert (status["total_steps"], status["state"]) == (34, "finished")
    assert status["sample_state"]["parts"] == {"glyphs": 900, "glyphs-2": 400, "rare": 300}
    assert "glyphs 900, glyphs-2 400, rare 300" in succeed("status", whole.path).output
    succeed("curate", whole.path, "--keep", tmp_path / "keep.parquet", "--cap", 5)
    for name in ("keep.parquet", "keep.dropped.parquet"):
        table = pq.read_table(tmp_path / name)
        numbers = np.searchsorted([900, 1_300], table["sample_id"], "right")
        assert table["part"].to_pylist() == [["glyphs", "glyphs-2", "rare"][number] for number in numbers]
        firsts = np.array([0, 900, 1_300])[numbers]
        np.testing.assert_array_equal(table["id_in_part"], table["sample_id"].to_numpy() - firsts)
    columns = answer("state", "check", whole.path)["snapshots"][0]["columns"]
    unseen = int((state.column("visits") == 0).sum())
    assert {(column["rows"], column["unseen"]) for column in columns} == {(1_600, unseen)}
    succeed("export", whole.path, "--to", tmp_path / "exported", "--format", "safetensors")
    part = whole.config().data.parts[2]
    succeed("embed", whole.path, part, tmp_path / "features.parquet")
    assert pq.read_metadata(tmp_path / "features.parquet").num_rows == 300


def test_a_run_goes_on_with_the_same_parts_only(whole, parts, tmp_path):
    shutil.copytree(whole.path, tmp_path / "run")
    a, b, c = (part.path for part in parts)

    def resume(*places):
        data = [word for place in places for word in ("--data", place)]
        return cli("train", *data, "--out", tmp_path / "run", "--resume")

    assert resume().exit_code == resume(a, b, c).exit_code == 0
    assert_one_line(resume(b, a, c), 2, "is not the dataset of", "pass that one's parts, in their order, with --data")
    assert_one_line(resume(a, b), 2, "3 shares for 2 parts")
    alone = ("train", "--config", tmp_path / "run" / "config.toml", "--data", a, "--print-config")
    assert {"parts", "shares"}.isdisjoint(tomllib.loads(succeed(*alone).stdout)["data"])


def test_a_mixture_that_was_moved_is_given_part_by_part(parts, tmp_path):
    moved = [shutil.copytree(part.path, tmp_path / part.path.parent.name / part.name) for part in parts]
    settings = to_tree(mixed(parts))
    del settings["data"]["parts"], settings["data"]["path"]
    with Trainer.from_settings(tmp_path / "run", moved, settings | {"steps": 2}) as trainer:
        trainer.train()
    again = [place.rename(place.with_name("new")) for place in moved]
    data = [word for place in again for word in ("--data", place)]
    assert {of["part"] for of in answer("inspect", tmp_path / "run", "--features", "none", *data)["parts"]} == {
        "new",
        "new-2",
        "new-3",
    }
    assert open_run(tmp_path / "run", again).dataset.n == 1_600
    succeed("export", tmp_path / "run", "--to", tmp_path / "exported", "--format", "safetensors")
    for wrong in (data[:2], data[2:], [word for place in again[::-1] for word in ("--data", place)]):
        assert_one_line(cli("inspect", tmp_path / "run", *wrong), 1, "pass --data for each part")


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Parts of 5,600, 3,000 and 1,800 glyphs."""
    folder = tmp_path_factory.mktemp("three")
    convert(GlyphSource(0), folder / "all", ConvertSettings(), workers=1)
    return made_parts(Dataset(folder / "all"), folder, 5_600, 3_000, 1_800)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("world", "budget"),
    [
        pytest.param(1, 280_000, id="windowed-1"),
        pytest.param(2, 0, id="resident-2"),
        pytest.param(1, 0, id="resident-1", marks=pytest.mark.soak),
        pytest.param(2, 280_000, id="windowed-2", marks=pytest.mark.soak),
    ],
)
def test_killed_ranks_count_exactly_and_repeat_their_losses(three, start_ranks, world, budget, tmp_path):
    data = [word for part in three for word in ("--data", part.path)]
    settings = sets(
        "epochs=3", "batch_size=1024", "log_every=1", "data.image_size=16", "model.dim=16", "checkpoint.every_steps=5",
        "model.image.config.width=4", "model.text.config.width=8",
        f"state.memory_budget={budget // world}" if budget else "state.memory_budget=none",
    )  # fmt: skip
    shares = [word for share in (5, 2, 1) for word in ("--share", share)]

    def start(run):
        return start_ranks(world, "train", *data, *shares, "--out", run.path, "--resume", *settings)

    whole, run = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "run")
    finish(start(whole))
    for steps in (8, 21):
        programs = start(run)
        wait_for(run, steps, programs)
        kill(programs)
    finish(start(run))
    assert_same_run(run, whole)
    config, visits = whole.config(), StateReader.open(run.state).column("visits")
    assert (config.order.window_blocks < config.order.blocks_per_shard) == (budget > 0)
    np.testing.assert_array_equal(visits, visits_by_hand(config, three))
    steps = len(losses(run))
    assert [of_part.sum() for of_part in np.split(visits, [5_600, 8_600])] == [640 * steps, 256 * steps, 128 * steps]


def test_what_does_not_fit_a_mixture_is_refused_in_one_line(parts, pairs_dataset, images_dataset, tmp_path):
    one, two, _ = (part.path for part in parts)
    out = ("--out", tmp_path / "run", *sets("data.image_size=16"))

    def train_on(*places, shares=(2, 1), more=()):
        data = [word for place in places for word in ("--data", place)]
        return cli("train", *data, *(word for share in shares for word in ("--share", share)), *out, *more)

    assert_one_line(train_on(one, two, more=sets("batch_size=100")), 2, "2 : 1", "use 96 or 144")
    assert_one_line(train_on(one, two, more=sets("batch_size=30")), 2, "use 48 or 96")
    assert_one_line(train_on(one, two, shares=(2, 1, 1)), 2, "3 shares for 2 parts")
    assert_one_line(train_on(one, shares=(1,)), 2, "1 shares for 0 parts of a mixture: give --data twice or more")
    assert_one_line(train_on(one, images_dataset.path), 1, one, images_dataset.path, "the other images")
    assert_one_line(train_on(one, two, more=("--weights", "x")), 2, "not for a mixture")
    assert not (tmp_path / "run").exists()
