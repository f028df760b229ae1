"""Runs of the reproduction that are made: trained, scored, stopped."""

import multiprocessing
import shutil

import numpy as np
import pytest
import torch

from thermopile.benchmarks import noto_emoji
from thermopile.benchmarks.reproduction import plan, running, sets
from thermopile.benchmarks.reproduction.comparison import BASELINES
from thermopile.benchmarks.reproduction.plan import (
    METHOD,
    Run,
    base_of,
    baseline_run,
    is_drawn,
    is_searched_on,
    train_run,
    wrong_share,
)
from thermopile.benchmarks.reproduction.results import PROBE, RETRIEVAL, Result
from thermopile.benchmarks.reproduction.scoring import Scorer
from thermopile.benchmarks.reproduction.sets import (
    TEST_SETS,
    BalancedGlyphs,
    open_sets,
    split,
    train_source,
    with_wrong_titles,
)
from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource, class_sizes
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.trainer.config import load_config
from thermopile.trainer.encoders import Encoders, with_names
from thermopile.trainer.evaluation.features import image_features


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A development set with a twentieth of each class's glyphs, two at least; each test set has two glyphs of each."""
    folder = tmp_path_factory.mktemp("reproduction")
    sizes = class_sizes()
    firsts = np.cumsum(sizes) - sizes  # the source lists class by class
    chosen = np.concatenate([first + np.arange(max(2, size // 20)) for first, size in zip(firsts, sizes, strict=True)])
    convert(GlyphSource(1), folder / "development", ConvertSettings(), workers=1, selection=chosen)
    tokenizer = Dataset(folder / "development").tokenizer_path
    first, *others = (folder / f"development-test-{number}" for number in range(TEST_SETS))
    convert(GlyphSource(200, test=True), first, ConvertSettings(), workers=1, selection=np.arange(0, 2000, 10),
            tokenizer_from=tokenizer)  # fmt: skip
    for other in others:
        shutil.copytree(first, other)
    return folder


def short(mode, label, **changed):
    """A first trial of one epoch."""
    run = train_run(METHOD[mode, label], METHOD[mode, label].grid()[0], "development", batch=64)
    return Run(run.data, run.settings | {"epochs": 1} | changed)


@pytest.mark.parametrize(("mode", "sides"), [("unimodal", ["sample"]), ("bimodal", ["image", "text"])])
@pytest.mark.wide
def test_a_run_is_trained_and_scored_and_leaves_its_temperatures_by_class(mode, sides, folder, tmp_path):
    made, right = running.make(short(mode, "isogclr"), folder, tmp_path)
    assert made.failed == ""
    assert right == {}  # of compared runs only
    assert made.share(PROBE) > 0.02
    assert (made.share(RETRIEVAL) is None) == (mode == "unimodal")
    assert [*made.temperatures] == sides
    for side in made.temperatures.values():
        assert side.sizes == sorted(side.sizes, reverse=True)
        assert len(side.class_means) == 100
        assert side.deciles[0] <= side.mean <= side.deciles[-1]
        assert (side.alignment is None) == (mode == "unimodal")
    assert Result.of_line(made.line()) == made
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wide
def test_runs_are_made_side_by_side_until_none_is_missing_or_a_signal_comes(folder):
    before, made = sorted(folder.iterdir()), []
    long = short("unimodal", "simclr", epochs=100_000)
    wanted = [short("bimodal", "clip"), long]

    def stop(of_run):
        made.append(of_run.result)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.make_missing(lambda: wanted, folder, stop, 2)
    assert [each.run for each in made] == wanted[:1]
    assert multiprocessing.active_children() == []
    wanted.remove(long)
    running.make_missing(lambda: [run for run in wanted if run not in [each.run for each in made]], folder, stop, 2)
    assert sorted(folder.iterdir()) == before


@pytest.mark.wide
def test_a_run_whose_loss_is_not_finite_is_a_result_without_scores_or_paths(folder, tmp_path):
    made, right = running.make(
        short("unimodal", "simclr", **{"optimizer.lr": 1e30, "optimizer.warmup": 0}), folder, tmp_path
    )
    assert "finite" in made.failed
    assert str(tmp_path) not in made.failed
    assert made.scores == right == {}
    assert made.share(PROBE) is None


@pytest.mark.wide
def test_baselines_are_scored_untrained(folder, tmp_path):
    shares = [running.make(baseline_run(mode, "development", name), folder, tmp_path).result.share(PROBE)
              for mode in plan.MODES for name in BASELINES]  # fmt: skip
    assert min(shares) > 0.01
    assert shares[0] == shares[2]  # pixels are the same
    assert len(set(shares)) == 3


def test_balanced_glyphs_are_as_many_as_long_tailed_ones():
    codes = BalancedGlyphs(0).groups().of_sample
    assert len(codes) == plan.SAMPLES
    assert set(np.bincount(codes)) == {108, 109}


def test_no_caption_is_in_two_sets_of_drawings_and_a_test_set_has_each_of_its_captions_once():
    captions = [f"drawing {number // 3 % 1000}" for number in range(4000)]  # 1,000 captions of 3 to 6 drawings
    parts = split(captions)
    assert [len(parts[name]) for name in ("-development", "")] == [300, 600]
    held = [{captions[place] for place in part} for part in parts.values()]
    assert [len(each) for each in held] == [100, 300, 600]
    assert len(set.union(*held)) == 1000


@pytest.mark.wide
def test_samples_are_right_in_the_order_of_their_source_and_banded_by_their_class(folder):
    """A dataset is shuffled; nothing else says which sample of which test set is right."""
    sets = open_sets(folder, "development")
    sets = sets._replace(tests=sets.tests[:2], classes=sets.classes[:2])
    encoders = Encoders.create(with_names(load_config({}).model), "unimodal", 32, None).eval()
    encoders.image.backbone = running.GreyPixels(32 * 32)
    scorer = Scorer(encoders, sets, load_config({"data": {"image_size": 32, "recipe": "glyphs"}}).data, None)
    classes = GlyphSource(200, test=True).groups().of_sample[::10].tolist()
    assert len(set(zip(classes * 2, scorer.bands().tolist(), strict=True))) == 100
    shuffled = sets.tests[0].shard(0).records()["source_index"]
    assert not (np.diff(shuffled) > 0).all()
    first, second = np.split(scorer.right()["knn"], 2)
    np.testing.assert_array_equal(first, second)
    in_ids = knn(*[image_features(encoders.image.backbone, each, RECIPES["glyphs"], 32, torch.device("cpu"), print)
                   for each in (sets.train, sets.tests[0])], sets)  # fmt: skip
    np.testing.assert_array_equal(first, in_ids[np.argsort(shuffled)])


def knn(train, test, sets):
    """Which test samples have most of their ten neighbours' class, by id; of classes with as many, the nearest's."""
    labels, truth = (each.column("group").to_pylist() for each in (sets.train, sets.tests[0]))
    right = []
    for features, own in zip(test, truth, strict=True):
        nearest = [labels[at] for at in (train @ features).topk(10).indices.tolist()]
        right.append(max(dict.fromkeys(nearest), key=nearest.count) == own)
    return np.array(right)


def test_wrong_titles_are_those_of_others_of_the_chosen_pairs():
    pairs = [noto_emoji.Pair(f"{number}.png", f"title {number}") for number in range(100)]
    chosen = np.arange(0, 100, 2)
    found = with_wrong_titles(pairs, chosen, 0.4, seed=1)
    wrong = [number for number in range(100) if found[number].title != pairs[number].title]
    assert len(wrong) == 20
    assert set(wrong) <= set(chosen.tolist())
    assert sorted(pair.title for pair in found) == sorted(pair.title for pair in pairs)
    assert [pair.filepath for pair in found] == [pair.filepath for pair in pairs]
    assert with_wrong_titles(pairs, chosen, 0.4, seed=1) == found != with_wrong_titles(pairs, chosen, 0.4, seed=2)


def test_a_name_of_data_tells_the_share_of_wrong_captions_and_what_it_is_for():
    assert (base_of("emoji-development@40"), wrong_share("emoji-development@40")) == ("emoji-development", 0.4)
    assert wrong_share("long-tailed") == 0
    searched = ["development", "development@40", "drawings-development", "emoji-development@40"]
    compared = ["long-tailed", "balanced", "drawings@40", "emoji"]
    assert [is_searched_on(data) for data in (*searched, *compared)] == [True] * 4 + [False] * 4
    assert [is_drawn(data) for data in (*searched, *compared)] == [False, False, True, True, False, False, True, True]
    swapped, as_drawn = train_source("development@40"), train_source("development")
    assert swapped.captions(np.arange(500)) != as_drawn.captions(np.arange(500))
    assert not any(test.alters for test in sets.test_sources("development@40"))
