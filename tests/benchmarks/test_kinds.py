"""What is planted in a dataset to judge what is said of it, and how the record tells it."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

from thermopile.benchmarks.kinds import (
    BATCH,
    CUT_SHARE,
    FEWEST,
    HEAP_SHARE,
    MOST,
    RUNS,
    WRONG_RUNS,
    PlantedSource,
    Run,
    crowds,
    heap_sizes,
    main,
    members,
    settings_of,
    tail,
    what_was_planted,
    wrong,
)
from thermopile.benchmarks.misfits import said_of_wrong, wrong_judged
from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.planted import Planting
from thermopile.pipeline.sources import Sample, Source

from support.runs import small, train

SIDE = 24


class Blocks(Source):
    """40 noisy pictures with captions, of two classes."""

    mode = "pairs"

    def __len__(self):
        return 40

    def __getitem__(self, index):
        blocks = np.random.default_rng(index).integers(0, 256, (3, 3, 3))
        picture = Image.fromarray(np.kron(blocks, np.ones((8, 8, 1))).astype(np.uint8))
        return Sample(self.uri(index), self.key(index), picture, f"block {index}", "odd" if index % 2 else "even")

    def uri(self, index):
        return f"blocks/{index}"

    def key(self, index):
        return str(index)

    def captions(self, indices):
        return [f"block {index}" for index in indices.tolist()]

    def describe(self):
        return {"kind": "blocks"}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    out = tmp_path_factory.mktemp("blocks") / "data"
    convert(Blocks(), out, ConvertSettings(), workers=1)
    return Dataset(out)


@pytest.fixture(scope="module")
def crowded(blocks, tmp_path_factory):
    """Return what was planted, and the dataset that was made of it."""
    planted, out = crowds(blocks, 0.5), tmp_path_factory.mktemp("crowded") / "data"
    convert(PlantedSource(blocks, "crowd-50", planted), out, ConvertSettings(), workers=1)
    return planted, Dataset(out)


def test_heaps_hold_all_copies_and_the_first_holds_its_share():
    sizes = heap_sizes(1000, np.random.default_rng(0))
    assert sum(sizes) == 1000
    assert sizes[0] == HEAP_SHARE * 1000
    assert min(sizes) >= 1
    assert len(set(sizes)) > 3


def test_copies_are_the_share_asked_for_and_their_originals_belong_to_the_crowd(blocks):
    planted = crowds(blocks, 0.2)
    assert np.mean(planted.copy > 0) == pytest.approx(0.2, abs=0.01)
    assert planted.ids[: blocks.n].tolist() == list(range(blocks.n))
    for name in set(planted.told.values()):
        places = np.array([place for place, told in planted.told.items() if told == name])
        assert len(set(planted.ids[places])) == 1
        assert sorted(planted.copy[places]) == list(range(len(places)))
    assert set(planted.told) >= set(np.flatnonzero(planted.copy).tolist())


def test_the_record_names_the_samples_of_the_crowd_by_their_ids_in_the_new_dataset(crowded):
    planted, dataset = crowded
    rows = what_was_planted(dataset).to_pylist()
    keys = dataset.column("key").to_pylist()
    assert len(rows) == len(planted.told)
    for row in rows:
        assert row["planted"] == "crowd"
        assert row["is_copy"] == ("~" in keys[row["sample_id"]])
    for name in {row["name"] for row in rows}:
        ids = [row["sample_id"] for row in rows if row["name"] == name]
        assert len({keys[sample_id].partition("~")[0] for sample_id in ids}) == 1


def test_a_copy_is_nearly_its_original_and_no_other(crowded):
    _, dataset = crowded
    keys = dataset.column("key").to_pylist()
    pictures = np.array([pixels(dataset, sample_id) for sample_id in range(dataset.n)])
    originals = [sample_id for sample_id, key in enumerate(keys) if "~" not in key]
    copies = [sample_id for sample_id, key in enumerate(keys) if "~" in key]
    for copy in copies:
        apart = [np.abs(pictures[copy] - pictures[original]).mean() for original in originals]
        nearest = originals[int(np.argmin(apart))]
        assert keys[copy].partition("~")[0] == keys[nearest]
        assert min(apart) > 0


def test_copies_of_every_other_original_have_captions_of_their_own(blocks, crowded):
    _, dataset = crowded
    rows = dataset.take(np.arange(dataset.n), ["key", "caption", "group"]).to_pylist()
    odd = {key: sample_id % 2 for sample_id, key in enumerate(blocks.column("key").to_pylist())}
    for row in rows:
        key, _, number = row["key"].partition("~")
        assert row["caption"] == f"block {key}" + (f" {number}" if number and odd[key] else "")
        assert row["group"] == ("odd" if int(key) % 2 else "even")


def pixels(dataset, sample_id):
    import io

    with Image.open(io.BytesIO(dataset.jpeg(sample_id))) as picture:
        return np.asarray(picture).astype(float)


def test_a_tail_cuts_some_classes_to_few_samples_and_leaves_the_others_as_they_were():
    sizes = {"largest": 600, **{f"fit {k}": 60 + k for k in range(12)}, "small": 59}
    first, classes = 0, {}
    for name, size in sizes.items():
        classes[name] = np.arange(first, first + size)
        first += size
    planted = tail(SimpleNamespace(n=first), classes)
    left = {name: int(np.isin(planted.ids, ids).sum()) for name, ids in classes.items()}
    cut = {name for name in sizes if left[name] != sizes[name]}
    assert sorted(left[name] for name in cut) == [FEWEST, 11, 23, MOST]
    assert cut < {name for name in sizes if name.startswith("fit")}
    for place, told in planted.told.items():
        assert planted.ids[place] in classes[told.removeprefix("tail ")]
    assert len(planted.told) == sum(left[name] for name in cut)
    assert sizes["largest"] > CUT_SHARE * first


def test_a_sample_of_two_cut_classes_is_left_out():
    shared = np.arange(60)
    classes = {
        name: np.append(shared, np.arange(first, first + 40))
        for name, first in zip("abcd", (60, 100, 140, 180), strict=True)
    }
    planted = tail(SimpleNamespace(n=3000), classes)
    assert not np.isin(shared, planted.ids).any()
    assert sorted(Counter(planted.told.values()).values()) == [FEWEST, 40]


def test_members_are_those_of_a_class_or_of_a_word_that_pictures_show():
    columns = {"group": ["x", None, "x"], "caption": ["A Frog with the frog", "frog-like 12 ox", "toad"]}
    dataset = SimpleNamespace(column=lambda name: pa.array(columns[name]))
    assert {name: ids.tolist() for name, ids in members(dataset, "group").items()} == {"x": [0, 2]}
    by_word = {name: ids.tolist() for name, ids in members(dataset, "word").items()}
    assert by_word == {"frog": [0, 1], "like": [1], "toad": [2]}


@pytest.mark.parametrize("how", ["random", "class", "word"])
def test_captions_are_exchanged_as_asked_and_the_record_names_those_that_are_wrong(blocks, tmp_path, how):
    planted = wrong(blocks, 0.5, how, members(blocks, "group" if how == "class" else "word"))
    convert(PlantedSource(blocks, f"wrong-{how}-50", planted), tmp_path / "data", ConvertSettings(), workers=1)
    made = Dataset(tmp_path / "data").take(np.arange(40), ["key", "group", "caption"]).to_pydict()
    is_wrong = {id for id in range(40) if made["caption"][id] != f"block {made['key'][id]}"}
    assert set(what_was_planted(Dataset(tmp_path / "data"))["sample_id"].to_pylist()) == is_wrong
    assert 15 <= len(is_wrong) <= 20
    if how == "class":
        assert all((int(made["caption"][id].split()[1]) % 2 == 1) == (made["group"][id] == "odd") for id in is_wrong)


def test_runs_with_wrong_captions_plant_enough_and_without_any_are_made_once():
    assert all(run.planted * run.samples >= 250 for run in WRONG_RUNS)
    assert all(settings_of(run, run.samples)["data.planted"] == run.planted for run in WRONG_RUNS)
    assert len([run for run in WRONG_RUNS if run.variant.endswith("-0")]) == 9
    assert len({run.name for run in WRONG_RUNS}) == len(WRONG_RUNS)


@pytest.mark.wide
def test_a_run_with_wrong_captions_is_judged_by_every_score(pairs_dataset, tmp_path):
    run = WRONG_RUNS[0]
    (tmp_path / "runs").mkdir()
    data = {"path": str(pairs_dataset.path), "image_size": 16, "planted": 0.4}
    done = train(small(pairs_dataset, data=data, epochs=8, batch_size=128), tmp_path / "runs" / run.name)
    wrong_ids = np.arange(0, 2_000, 20)
    pq.write_table(pa.table({"sample_id": wrong_ids}), tmp_path / "runs" / f"{run.name}.parquet")
    line = wrong_judged(tmp_path, run, "latest")
    assert (line["samples"], line["planted"]) == (2_000, len(Planting(pairs_dataset, 0, 0.4).all()[0]))
    others = np.setdiff1d(np.arange(2_000), Planting(pairs_dataset, 0, 0.4).all()[0])
    assert {"cosine", "margin"} <= line.keys()
    for score in line.keys() & {"log s", "log s over the run", "cosine", "margin", "cosine and log s"}:
        assert set(line[score]["true"]) <= {36, 100, 200, 500, 1_000}
        assert line[score]["share"][0] == pytest.approx(np.isin(wrong_ids, others).sum() / len(others), rel=0.3)
    assert "true and expected" in said_of_wrong({"one": json.loads(json.dumps(line))})
    assert done.path == tmp_path / "runs" / run.name


def test_a_plain_dataset_and_one_without_an_exchange_have_empty_records(blocks, tmp_path):
    assert what_was_planted(blocks).num_rows == 0
    none = PlantedSource(blocks, "wrong-random-0", wrong(blocks, 0.0, "random", {}))
    convert(none, tmp_path / "data", ConvertSettings(), workers=1)
    assert what_was_planted(Dataset(tmp_path / "data")).num_rows == 0


def test_checkpoints_after_4_8_and_20_epochs_are_kept():
    settings = settings_of(Run("fashion", "plain", 1), 1000)
    steps = 1000 // BATCH
    assert {epochs * steps % settings["checkpoint.keep_every"] for epochs in (4, 8, 20)} == {0}
    assert settings["checkpoint.every_steps"] == settings["checkpoint.keep_every"]
    assert settings["seed"] == 1


def test_the_plan_names_every_run_once_and_both_halves_have_all_variants(tmp_path):
    assert len({run.name for run in RUNS}) == len(RUNS)
    variants = {
        half: {(run.variant, run.seed) for run in RUNS if run.of.half == half} for half in ("made on", "judged on")
    }
    assert variants["made on"] == variants["judged on"]
    done = CliRunner().invoke(main, [str(tmp_path / "none"), "--plan", "--only", "fashion"])
    assert done.exit_code == 0, done.output
    assert done.output.count("| judged on | fashion |") == sum(run.data == "fashion" for run in RUNS)
    assert not (tmp_path / "none").exists()
