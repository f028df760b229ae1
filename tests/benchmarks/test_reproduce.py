"""`benchmarks/reproduce.py`: what it makes, what it does not make twice, and how it judges the papers' claims."""

import re
from subprocess import CalledProcessError

import numpy as np
import pytest

from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource, class_sizes
from thermopile.tools.cli import main
from thermopile.trainer.errors import RunError
from thermopile.trainer.preemption import EXIT_CODE

from reproduction.claims import CLAIMS, NO, NOISE, NOT_TESTED, REVERSED, SHOWS, verdict
from reproduction.page import write_page
from reproduction.plan import FULL, METHODS, SHORT, Plan, Run
from reproduction.results import LINEAR, RETRIEVAL, Estimate, Result, Results, Temperatures
from reproduction.running import EXIT_CODE_STOPPED, Sets, make_runs, thermopile

TINY = Plan((128,), {"bimodal": 1, "unimodal": 1}, {"bimodal": 2, "unimodal": 1},
            tuple(m for m in METHODS if m.name == "isogclr"))  # fmt: skip
METHOD = {(method.mode, method.name): method for method in METHODS}
CLAIM = {claim.claim: claim for claim in CLAIMS}


@pytest.fixture(scope="module")
def sets(pairs_dataset, tmp_path_factory):
    """A twentieth of each class's glyphs, two at least: long-tailed still; and the balanced 2,000 for testing."""
    sizes = class_sizes()
    firsts = np.cumsum(sizes) - sizes  # the source lists class by class
    chosen = np.concatenate([first + np.arange(max(2, size // 20)) for first, size in zip(firsts, sizes, strict=True)])
    out = tmp_path_factory.mktemp("tail") / "glyphs"
    convert(GlyphSource(0), out, ConvertSettings(), workers=1, selection=chosen)
    return Sets(Dataset(out), pairs_dataset)


class Commands:
    """Does what it is told, up to so many times, and remembers it."""

    def __init__(self, most=100):
        self.most, self.given = most, []

    def __call__(self, *arguments):
        if len(self.given) == self.most:
            return False  # as if by a signal
        self.given.append(arguments)
        return main(list(arguments), standalone_mode=False) != EXIT_CODE


@pytest.fixture(scope="module")
def made(sets, tmp_path_factory):
    """A tiny comparison, stopped after its first run and called again: the folder, both calls, what it came to."""
    folder = tmp_path_factory.mktemp("reproduction")
    first, second = Commands(most=1), Commands()
    stopped = make_runs(TINY, sets, folder, first)
    assert stopped is None
    return folder, first, second, make_runs(TINY, sets, folder, second)


def test_a_comparison_that_was_stopped_goes_on_and_makes_nothing_twice(made, sets):
    folder, first, second, results = made
    names = [run.name for run in TINY.runs()]
    assert [len(first.given), len(second.given)] == [1, len(names) - 1]
    again = Commands(most=0)
    assert make_runs(TINY, sets, folder, again) == results
    assert [result.run.name for result in results.every] == names
    assert all(result.share(LINEAR) is not None for result in results.every)


def test_a_run_made_with_other_settings_is_refused_by_what_changed(made, sets, tmp_path):
    folder, *_ = made
    longer = Plan(TINY.batch_sizes, TINY.seeds, {"bimodal": 3, "unimodal": 1}, TINY.methods)
    with pytest.raises(RunError, match=r"made with other settings \(epochs\); delete"):
        make_runs(longer, sets, folder, Commands(most=0))


def test_the_page_holds_every_claim_with_a_verdict_and_every_score(made, tmp_path):
    *_, results = made
    page = write_page(results, TINY, tmp_path / "docs" / "page.md")
    text = page.read_text("utf-8")
    for claim in CLAIMS:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {claim.claim} |")]
        assert re.search(r"\*\*(.+)\*\* \|$", line)[1] in {SHOWS, NO, NOISE, REVERSED, NOT_TESTED}
    (iso,) = [r for r in results.every if r.run.name.startswith("bimodal-isogclr")]
    assert f"{100 * iso.scores['probe']['lbfgs']['tail']:.1f}" in text
    assert f"{iso.temperatures['image'].spearman:+.2f}".replace("-", "−") in text
    assert (tmp_path / "docs" / "page.png").read_bytes().startswith(b"\x89PNG")


def result(mode, method, share, *, seed=0, batch_size=128, tau=None):
    """A run all of whose scores are `share`; tau maps a side to its Spearman correlation and its skewness."""
    variants = {"probe": ["lbfgs"], "image_to_text": ["1"], "text_to_image": ["1"], "zero_shot": ["top1"]}
    return Result(
        run=Run(METHOD[mode, method], batch_size, seed, 1),
        scores={score: {variant: {"all": share, "tail": share} for variant in of} for score, of in variants.items()},
        classes_of_band={"head": 34, "medium": 33, "tail": 33}, test_samples=2000, samples=10_000,
        temperatures={side: Temperatures(0.1, skewness, spearman, 0.0)
                      for side, (spearman, skewness) in (tau or {}).items()},
        seconds=1.0, machine={},
    )  # fmt: skip


def verdict_of(claim, *results):
    return CLAIM[claim].judge(Results(list(results))).verdict


def test_a_difference_shows_only_beyond_twice_its_standard_error():
    assert verdict(Estimate(2.1, 2.0)) == SHOWS
    assert verdict(Estimate(1.9, 2.0)) == verdict(Estimate(-1.9, 2.0)) == NOISE
    assert verdict(Estimate(-2.1, 2.0)) == REVERSED


def test_one_method_is_above_another_by_the_whole_test_set():
    # Of 2,000 samples at 50 %: one standard error is 1.118 points, of a difference 1.581.
    for ahead, expected in ((0.0310, NOISE), (0.0325, SHOWS), (-0.0325, REVERSED)):
        pair = result("unimodal", "decl", 0.5 + ahead), result("unimodal", "simclr", 0.5)
        assert verdict_of("DeCL is above SimCLR", *pair) == expected
    assert verdict_of("DeCL is above SimCLR", pair[0]) == NOT_TESTED


def test_the_spread_over_seeds_counts_as_noise():
    def verdict_at(spread):
        return verdict_of(
            "iSogCLR is above CLIP in retrieval",
            *(result("bimodal", "isogclr", 0.55 + sign * spread, seed=seed) for seed, sign in enumerate((-1, 1))),
            *(result("bimodal", "clip", 0.5 + sign * spread, seed=seed) for seed, sign in enumerate((-1, 1))),
        )

    assert verdict_at(0.001) == SHOWS
    assert verdict_at(0.03) == NOISE


def test_the_error_of_a_mean_is_that_of_the_test_and_of_the_seeds():
    seeds = [result("bimodal", "clip", share, seed=seed) for seed, share in enumerate((0.48, 0.52))]
    estimate = Results(seeds).mean("bimodal", "clip", 128, RETRIEVAL)
    assert estimate.points == pytest.approx(50)
    assert estimate.noise == pytest.approx(200 * np.sqrt(0.25 / 2000 + 0.0008 / 2))


def test_what_depends_on_the_batch_size_takes_two_of_them():
    def runs(small, large, method):
        return [result("unimodal", method, share, batch_size=b) for b, share in ((128, small), (256, large))]

    hardly = "AUC-CL hardly depends on the batch size"
    assert verdict_of(hardly, *runs(0.5, 0.51, "auc_cl")) == SHOWS
    assert verdict_of(hardly, *runs(0.5, 0.6, "auc_cl")) == NO
    assert verdict_of(hardly, runs(0.5, 0.5, "auc_cl")[0]) == NOT_TESTED
    most = "DeCL gains most over SimCLR with small batches"
    assert verdict_of(most, *runs(0.7, 0.6, "decl"), *runs(0.5, 0.6, "simclr")) == SHOWS
    assert verdict_of(most, *runs(0.6, 0.7, "decl"), *runs(0.6, 0.5, "simclr")) == REVERSED
    assert verdict_of(most, *runs(0.6, 0.6, "decl")) == NOT_TESTED


def test_rare_classes_are_cold_where_every_side_says_so():
    claim = "rare semantics get low temperatures, on pairs"
    for first, second, expected in ((0.21, 0.9, SHOWS), (0.19, 0.9, NOISE), (-0.9, -0.21, REVERSED)):
        tau = {"image": (first, 0.0), "text": (second, 0.0)}
        assert verdict_of(claim, result("bimodal", "isogclr", 0.5, tau=tau)) == expected  # of 100 classes
    assert verdict_of(claim, result("bimodal", "clip", 0.5)) == NOT_TESTED


def test_the_shapes_of_the_temperatures_are_told_by_their_skewness():
    claim = "temperatures are near-Gaussian on images and have a long tail on pairs"
    for pairs, images, expected in ((0.6, 0.4, SHOWS), (0.4, 0.4, NO), (0.6, 0.6, NO)):
        runs = (result("bimodal", "isogclr", 0.5, tau={"image": (0.9, pairs)}),
                result("unimodal", "isogclr", 0.5, tau={"sample": (0.9, images)}))  # fmt: skip
        assert verdict_of(claim, *runs) == expected
    assert verdict_of(claim, runs[0]) == NOT_TESTED


def test_the_full_comparison_holds_the_short_one():
    assert {run.name for run in SHORT.runs()} < {run.name for run in FULL.runs()}
    assert len(SHORT.runs()) == 12


def test_a_command_that_fails_is_an_error_and_not_a_stop():
    with pytest.raises(CalledProcessError):
        thermopile("convert", "nothing")
    assert EXIT_CODE_STOPPED == EXIT_CODE
