"""Every outcome of every verdict on the papers' claims, on made-up results."""

import numpy as np
import pytest

from made_results import CLAIM, Made
from reproduction import plan
from reproduction.claims import NO, NOISE, NOT_CLEAR, NOT_TESTED, REVERSED, SHOWS, verdict, verdict_of_all
from reproduction.comparison import BASELINES, Comparison, Estimate
from reproduction.plan import baseline_run
from reproduction.results import RETRIEVAL, Results
from reproduction.schedule import CONSTANT_GAMMA, OPTIMIZERS, optimized, with_optimizer


def test_a_figure_shows_only_beyond_its_error_and_several_by_the_worst():
    shows, noise, reverse = Estimate(2.1, 2.0), Estimate(-1.9, 2.0), Estimate(-2.1, 2.0)
    assert [verdict(each) for each in (shows, noise, reverse)] == [SHOWS, NOISE, REVERSED]
    assert verdict_of_all([shows, shows]) == SHOWS
    assert verdict_of_all([shows, noise]) == NOISE
    assert verdict_of_all([noise, shows, reverse]) == REVERSED


ABOVE = "iSogCLR is above SimCLR, images"


@pytest.mark.parametrize(("ahead", "expected"), [(0.0310, NOISE), (0.0325, SHOWS), (-0.0325, REVERSED)])
def test_one_method_is_above_another_by_twice_the_error_of_drawing_the_test_set(ahead, expected):
    # Of 2,000 samples at 50 %: one standard error is 1.118 points, of a difference 1.581.
    made = Made().seeds("unimodal", "isogclr", [0.5 + ahead]).seeds("unimodal", "simclr", [0.5])
    assert made.verdict(ABOVE) == expected


def test_the_spread_over_seeds_counts_and_is_pooled_over_methods():
    made = Made().seeds("unimodal", "isogclr", [0.56]).seeds("unimodal", "simclr", [0.5])
    assert made.verdict(ABOVE) == SHOWS
    made.seeds("unimodal", "sogclr", [0.4, 0.5, 0.6])
    assert made.verdict(ABOVE) == NOISE


def test_the_error_of_a_mean_is_that_of_the_test_and_of_the_seeds():
    made = Made().seeds("bimodal", "clip", [0.48, 0.5, 0.52])
    runs = Comparison(made.results)
    estimate = runs.mean(runs.seeds("bimodal", "clip"), RETRIEVAL)
    assert estimate.points == pytest.approx(50)
    assert estimate.noise == pytest.approx(200 * np.sqrt(0.25 / 2000 + 0.0004 / 3))


@pytest.mark.parametrize("floor", [0.19, 0.25])
def test_there_is_no_verdict_where_the_baseline_is_not_clearly_above_what_nothing_has_trained(floor):
    made = Made(floor).seeds("unimodal", "isogclr", [0.4] * 3).seeds("unimodal", "simclr", [0.22] * 3)
    assert made.verdict(ABOVE) == (SHOWS if floor < 0.2 else NOT_CLEAR)


def test_there_is_no_verdict_without_a_score_of_what_nothing_has_trained():
    made = Made().seeds("unimodal", "isogclr", [0.6]).seeds("unimodal", "simclr", [0.5])
    assert made.verdict(ABOVE) == SHOWS
    floors = {baseline_run("unimodal", "long-tailed", name).key for name in BASELINES[1:]}
    made.results = Results(each for each in made.results if each.run.key not in floors)
    assert made.verdict(ABOVE) == NOT_CLEAR


def test_what_was_not_run_with_every_seed_is_not_tested():
    made = Made()
    assert {made.verdict(claim) for claim in CLAIM} == {NOT_TESTED}
    made.seeds("unimodal", "isogclr", [0.6, 0.6]).seeds("unimodal", "simclr", [0.5])
    assert made.verdict(ABOVE) == NOT_TESTED


def test_a_training_that_failed_counts_as_a_score_of_0():
    made = Made().seeds("unimodal", "isogclr", [0.6, None, 0.6]).seeds("unimodal", "simclr", [0.5])
    runs = Comparison(made.results)
    assert runs.mean(runs.seeds("unimodal", "isogclr")).points == pytest.approx(40)
    assert made.verdict(ABOVE) == NOISE


@pytest.mark.parametrize(("balanced", "expected"), [(0.5, SHOWS), (0.58, NOISE), (0.75, REVERSED), (None, NOT_TESTED)])
def test_the_gain_on_a_long_tail_is_held_against_that_on_balanced_classes(balanced, expected):
    made = Made().seeds("unimodal", "simclr", [0.5]).seeds("unimodal", "isogclr", [0.6])
    if balanced is not None:
        made.seeds("unimodal", "simclr", [0.5], data="balanced")
        made.seeds("unimodal", "isogclr", [balanced], data="balanced")
    assert made.verdict("the gain over SimCLR is larger on a long tail") == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"), [(0.21, 0.9, SHOWS), (0.19, 0.9, NOISE), (-0.9, -0.21, REVERSED)]
)
def test_rare_classes_are_cold_where_every_seed_and_side_says_so(first, second, expected):
    made = Made().seeds("bimodal", "isogclr", [0.5], image=(first, 0, 0.1), text=(second, 0, 0.1))  # of 100 classes
    assert made.verdict("rare semantics get low temperatures, pairs") == expected


@pytest.mark.parametrize(("pairs", "images", "expected"), [(0.6, 0.4, SHOWS), (0.4, 0.4, NO), (0.6, 0.6, NO)])
def test_the_shapes_of_the_temperatures_are_told_by_their_skewness(pairs, images, expected):
    made = Made().seeds("bimodal", "isogclr", [0.5], image=(0.9, pairs, 0.1))
    made.seeds("unimodal", "isogclr", [0.5], sample=(0.9, images, 0.1))
    assert made.verdict("temperatures are near-Gaussian on images, long-tailed on pairs") == expected


@pytest.mark.parametrize(("left", "expected"), [(0.02, SHOWS), (0.04, NO)])
def test_the_last_temperatures_forget_tau_init_where_little_of_the_difference_is_left(left, expected):
    made = Made()
    for mode, first, other in (("unimodal", 0.5, 0.2), ("bimodal", 0.05, 0.2)):
        made.seeds(mode, "isogclr", [0.5], side=(0.9, 0.0, 0.3))
        made.seeds(mode, "isogclr", [0.5], changed={"objective.tau_init": other},
                   side=(0.9, 0.0, 0.3 + left * abs(first - other) / 0.3))  # fmt: skip
    assert made.verdict("the last temperatures do not depend on tau_init") == expected


def test_what_depends_on_the_batch_size_is_told_by_the_smallest_and_the_largest():
    def verdict_at(claim, decl, simclr):
        made = Made().swept("decl", dict(zip((16, 256), decl, strict=True)))
        return made.swept("simclr", dict(zip((16, 256), simclr, strict=True))).verdict(claim)

    most = "DeCL gains most over SimCLR with small batches"
    assert verdict_at(most, (0.7, 0.6), (0.5, 0.6)) == SHOWS
    assert verdict_at(most, (0.6, 0.6), (0.6, 0.6)) == NOISE
    assert verdict_at(most, (0.6, 0.7), (0.6, 0.5)) == REVERSED
    assert verdict_at(most, (0.6, 0.7), (0.2, 0.5)) == NOT_CLEAR
    assert verdict_at("DeCL is above SimCLR, batch 16", (0.7, 0.6), (0.5, 0.6)) == SHOWS
    assert verdict_at("DeCL is above SimCLR, batch 256", (0.7, 0.5), (0.5, 0.6)) == REVERSED


@pytest.mark.parametrize(
    ("auc_cl", "simclr", "expected"),
    [((0.5, 0.51), (0.5, 0.6), SHOWS), ((0.5, 0.51), (0.5, 0.51), NOISE), ((0.5, 0.6), (0.5, 0.6), NO),
     ((0.5, 0.4), (0.5, 0.6), NO), ((0.2, 0.51), (0.5, 0.6), NOT_CLEAR)],
)  # fmt: skip
def test_hardly_depending_on_the_batch_size_is_a_change_within_an_error_that_would_tell_simclrs(
    auc_cl, simclr, expected
):
    made = Made().swept("auc_cl", dict(zip((16, 256), auc_cl, strict=True)))
    made.swept("simclr", dict(zip((16, 256), simclr, strict=True)))
    assert made.verdict("AUC-CL hardly depends on the batch size") == expected


@pytest.mark.parametrize(
    ("usual", "reached", "expected"),
    [(0.5, 0.01, SHOWS), (0.5, 0.2, SHOWS), (0.5, 0.3, NO), (0.2, 0.01, NOT_CLEAR), (0.5, None, SHOWS)],
)
def test_collapse_is_a_score_that_is_not_above_an_untrained_encoders(usual, reached, expected):
    made = Made().seeds("unimodal", "auc_cl", [usual])
    made.seeds("unimodal", "auc_cl", [reached], changed={"objective.alpha": 0.0})
    assert made.verdict("AUC-CL with alpha = 0 collapses") == expected


def test_a_side_whose_temperatures_are_all_equal_says_nothing_of_rare_classes():
    made = Made().seeds("bimodal", "isogclr", [0.5], image=(0.9, 0, 0.1), text=(None, 0, 0.1))
    assert made.verdict("rare semantics get low temperatures, pairs") == NOISE


@pytest.mark.parametrize(("v0", "expected"), [(0.4, SHOWS), (0.51, NOISE), (0.6, REVERSED)])
def test_the_best_version_is_above_every_other(v0, expected):
    made = Made()
    for version, share in enumerate((v0, 0.4, 0.4, 0.5)):
        made.seeds("bimodal", f"fastclip_v{version}", [share])
    assert made.verdict("FastCLIP-v3 is the best of four versions") == expected


@pytest.mark.parametrize(("gain", "expected"), [(0.03, SHOWS), (0.01, NOISE), (-0.03, REVERSED)])
def test_a_cosine_of_gamma_is_judged_by_the_mean_of_three_versions(gain, expected):
    made = Made()
    for version in (1, 2, 3):
        made.seeds("bimodal", f"fastclip_v{version}", [0.5 + gain])
        made.seeds("bimodal", f"fastclip_v{version}", [0.5], changed=CONSTANT_GAMMA)
    assert made.verdict("a cosine of gamma is better than a constant one") == expected


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((0.7, 0.6, 0.5, 0.4), SHOWS), ((0.7, 0.6, 0.6, 0.4), NOISE), ((0.7, 0.6, 0.5, 0.55), REVERSED)],
)
def test_the_order_of_the_optimisers_shows_where_every_step_does(shares, expected):
    made = Made()
    for name, share in zip(OPTIMIZERS, shares, strict=True):
        made.search(with_optimizer(name, made.results))
        for seed in plan.SEEDS:
            made.add(optimized(name, seed, made.results), share)
    assert made.verdict("AdamW is above Lion, Lion above LAMB, LAMB above SGD") == expected
