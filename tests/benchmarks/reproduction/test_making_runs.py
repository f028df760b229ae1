"""Runs of the reproduction that are made: trained, scored, stopped."""

import multiprocessing

import numpy as np
import pytest

from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource, class_sizes

from reproduction import plan, running
from reproduction.comparison import BASELINES
from reproduction.plan import METHOD, Run, baseline_run, train_run
from reproduction.results import PROBE, RETRIEVAL, Result
from reproduction.sets import BalancedGlyphs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A development set with a twentieth of each class's glyphs, two at least, and two test glyphs of each."""
    folder = tmp_path_factory.mktemp("reproduction")
    sizes = class_sizes()
    firsts = np.cumsum(sizes) - sizes  # the source lists class by class
    chosen = np.concatenate([first + np.arange(max(2, size // 20)) for first, size in zip(firsts, sizes, strict=True)])
    convert(GlyphSource(1), folder / "development", ConvertSettings(), workers=1, selection=chosen)
    tokenizer = Dataset(folder / "development").tokenizer_path
    convert(GlyphSource(1, test=True), folder / "development-test", ConvertSettings(), workers=1,
            selection=np.arange(0, 2000, 10), tokenizer_from=tokenizer)  # fmt: skip
    return folder


def short(mode, label, **changed):
    """A first trial of one epoch."""
    run = train_run(METHOD[mode, label], METHOD[mode, label].candidates()[0], "development", batch=64)
    return Run(run.data, run.settings | {"epochs": 1} | changed)


@pytest.mark.parametrize(("mode", "sides"), [("unimodal", ["sample"]), ("bimodal", ["image", "text"])])
@pytest.mark.wide
def test_a_run_is_trained_and_scored_and_leaves_its_temperatures_by_class(mode, sides, folder, tmp_path):
    made = running.make(short(mode, "isogclr"), folder, tmp_path)
    assert made.failed == ""
    assert made.share(PROBE) > 0.02
    assert (made.share(RETRIEVAL) is None) == (mode == "unimodal")
    assert [*made.temperatures] == sides
    for side in made.temperatures.values():
        assert side.sizes == sorted(side.sizes, reverse=True)
        assert len(side.class_means) == 100
        assert side.deciles[0] <= side.mean <= side.deciles[-1]
    assert Result.of_line(made.line()) == made
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wide
def test_runs_are_made_side_by_side_until_none_is_missing_or_a_signal_comes(folder):
    before, made = sorted(folder.iterdir()), []
    long = short("unimodal", "simclr", epochs=100_000)
    wanted = [short("bimodal", "clip"), long]

    def stop(result):
        made.append(result)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.make_missing(lambda: wanted, folder, stop)
    assert [each.run for each in made] == wanted[:1]
    assert multiprocessing.active_children() == []
    wanted.remove(long)
    running.make_missing(lambda: [run for run in wanted if run not in [each.run for each in made]], folder, stop)
    assert sorted(folder.iterdir()) == before


@pytest.mark.wide
def test_a_run_whose_loss_is_not_finite_is_a_result_without_scores_or_paths(folder, tmp_path):
    made = running.make(
        short("unimodal", "simclr", **{"optimizer.lr": 1e30, "optimizer.warmup_steps": 0}), folder, tmp_path
    )
    assert "finite" in made.failed
    assert str(tmp_path) not in made.failed
    assert made.scores == {}
    assert made.share(PROBE) == 0.0


@pytest.mark.wide
def test_baselines_are_scored_untrained(folder, tmp_path):
    shares = [running.make(baseline_run(mode, "development", name), folder, tmp_path).share(PROBE)
              for mode in plan.MODES for name in BASELINES]  # fmt: skip
    assert min(shares) > 0.01
    assert shares[0] == shares[2]  # pixels are the same
    assert len(set(shares)) == 3


def test_balanced_glyphs_are_as_many_as_long_tailed_ones():
    codes = BalancedGlyphs(0).groups().of_sample
    assert len(codes) == plan.SAMPLES
    assert set(np.bincount(codes)) == {108, 109}
