"""Every outcome of every verdict on the papers' claims, on made-up results."""

import numpy as np
import pytest

from thermopile.benchmarks.reproduction.claims import (
    EQUIVALENT,
    NO,
    NOT_CLEAR,
    NOT_TESTED,
    REVERSED,
    SHOWS,
    UNDECIDED,
    verdict,
)
from thermopile.benchmarks.reproduction.comparison import BASELINES, Comparison, Estimate, in_points
from thermopile.benchmarks.reproduction.plan import METHOD, baseline_run
from thermopile.benchmarks.reproduction.results import Results
from thermopile.benchmarks.reproduction.schedule import (
    ALPHAS,
    FEW_SEEDS,
    NOISY,
    PLAIN_SETTINGS,
    RHOS,
    SEEDS,
    TAUS,
    for_tau,
    headline,
    plain,
)
from thermopile.benchmarks.reproduction.sets import captions_of

from support.made_results import CLAIM, Made, right

SPREAD = (-0.03, 0.03, -0.02, 0.02, 0.0)
"""What seeds differ by: the error of their mean is 3.2 points."""


@pytest.mark.parametrize(
    ("points", "noise", "expected"),
    [(2.1, 2.0, SHOWS), (0.3, 0.2, SHOWS), (-2.1, 2.0, REVERSED), (1.9, 2.0, UNDECIDED), (-0.4, 0.5, EQUIVALENT),
     (0.5, 0.5, EQUIVALENT), (0.5, 0.6, UNDECIDED), (-0.6, 0.7, UNDECIDED)],
)  # fmt: skip
def test_a_figure_shows_beyond_its_error_and_is_none_that_matters_where_its_interval_is_within_a_point(
    points, noise, expected
):
    assert verdict(Estimate(points, noise)) == expected


ABOVE = "iSogCLR is above SimCLR, images"
OUTCOMES = [
    ([0.55], SHOWS), ([0.45], REVERSED), ([0.503], SHOWS), ([0.5], EQUIVALENT),
    ([0.5 + each for each in SPREAD], UNDECIDED), ([0.54 + each for each in SPREAD], SHOWS),
    ([0.46 + each for each in SPREAD], REVERSED),
]  # fmt: skip


@pytest.mark.parametrize(("shares", "expected"), OUTCOMES)
def test_one_method_is_above_another_beyond_the_error_of_test_samples_and_seeds(shares, expected):
    made = Made().seeds("unimodal", "isogclr", shares).seeds("unimodal", "simclr", [0.5])
    assert made.verdict(ABOVE) == expected


def test_what_both_methods_have_in_a_seed_is_no_error_of_their_difference():
    shares = [0.5 + each for each in SPREAD]
    made = Made().seeds("unimodal", "isogclr", [each + 0.01 for each in shares]).seeds("unimodal", "simclr", shares)
    assert made.verdict(ABOVE) == SHOWS


def test_with_a_linear_head_methods_are_compared_with_each_other():
    made = Made().seeds("unimodal", "isogclr", [0.6]).seeds("unimodal", "simclr", [0.5])
    assert made.verdict(f"{ABOVE}, linear head") == NOT_TESTED
    made.seeds("unimodal", "isogclr", [0.4], head="linear").seeds("unimodal", "simclr", [0.5], head="linear")
    assert made.verdict(f"{ABOVE}, linear head") == REVERSED


@pytest.mark.parametrize("floor", [0.19, 0.25])
def test_there_is_no_verdict_where_the_baseline_is_not_clearly_above_what_nothing_has_trained(floor):
    made = Made(floor).seeds("unimodal", "isogclr", [0.4]).seeds("unimodal", "simclr", [0.22])
    assert made.verdict(ABOVE) == (SHOWS if floor < 0.2 else NOT_CLEAR)


def test_a_baseline_is_not_clearly_above_what_nothing_has_trained_within_its_error():
    made = Made().seeds("unimodal", "isogclr", [0.4])
    made.seeds("unimodal", "simclr", [0.21 + each for each in SPREAD])
    assert made.verdict(ABOVE) == NOT_CLEAR


def test_pairs_with_the_same_caption_count_as_one():
    made = Made().seeds("bimodal", "isogclr", [0.6]).seeds("bimodal", "clip", [0.5])
    runs = Comparison(made.results)
    own, other = (runs.seeds(METHOD["bimodal", name]) for name in ("isogclr", "clip"))
    apart = right(0.6)["text_to_image"].astype(float) - right(0.5)["text_to_image"]
    expected = in_points(np.tile(apart, (len(own), 1)), captions_of("long-tailed"))
    assert runs.gap(own, other) == pytest.approx(expected)
    assert expected.noise != pytest.approx(in_points(apart[None], None).noise, rel=0.01)


def test_there_is_no_verdict_without_a_score_of_what_nothing_has_trained():
    made = Made().seeds("unimodal", "isogclr", [0.6]).seeds("unimodal", "simclr", [0.5])
    assert made.verdict(ABOVE) == SHOWS
    floors = {baseline_run("unimodal", "long-tailed", name).key for name in BASELINES[1:]}
    made.results = type(made.results)(each for each in made.results if each.run.key not in floors)
    assert made.verdict(ABOVE) == NOT_CLEAR


def test_what_was_not_run_with_every_seed_is_not_tested():
    made = Made()
    assert {made.verdict(claim) for claim in CLAIM} == {NOT_TESTED}
    made.seeds("unimodal", "isogclr", [0.6] * 4).seeds("unimodal", "simclr", [0.5] * 4)
    assert made.verdict(ABOVE) == NOT_TESTED


def test_a_training_that_failed_counts_as_a_score_of_0():
    made = Made().seeds("unimodal", "isogclr", [0.6, None, 0.6, 0.6, 0.6]).seeds("unimodal", "simclr", [0.5])
    runs = Comparison(made.results)
    assert runs.mean(runs.seeds(METHOD["unimodal", "isogclr"])).points == pytest.approx(48)
    assert made.verdict(ABOVE) == UNDECIDED


def test_results_without_their_test_samples_say_nothing():
    made = Made().seeds("unimodal", "isogclr", [0.6]).seeds("unimodal", "simclr", [0.5])
    made.results = Results(made.results)
    assert made.verdict(ABOVE) == NOT_TESTED


@pytest.mark.parametrize(
    ("balanced", "expected"), [(0.5, SHOWS), (0.6, EQUIVALENT), (0.75, REVERSED), (None, NOT_TESTED)]
)
def test_the_gain_on_a_long_tail_is_held_against_that_on_balanced_classes(balanced, expected):
    made = Made().seeds("unimodal", "simclr", [0.5]).seeds("unimodal", "isogclr", [0.6])
    if balanced is not None:
        made.seeds("unimodal", "simclr", [0.5], data="balanced")
        made.seeds("unimodal", "isogclr", [balanced], data="balanced")
    assert made.verdict("the gain over SimCLR is larger on a long tail") == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(0.21, 0.9, SHOWS), (0.19, 0.9, NO), (-0.9, -0.21, REVERSED), (0.9, None, NO)],
)
def test_rare_classes_are_cold_where_every_seed_and_side_says_so(first, second, expected):
    made = Made().seeds("bimodal", "isogclr", [0.5], image=(first, 0, 0.1), text=(second, 0, 0.1))  # of 100 classes
    assert made.verdict("rare semantics get low temperatures, pairs") == expected


def test_temperatures_of_settings_chosen_for_them_are_judged_apart():
    made = Made().seeds("unimodal", "isogclr", [0.5], sample=(0.1, 0, 0.1))
    for seed in SEEDS["unimodal"]:
        made.add(for_tau(seed), 0.5, sample=(0.6, 0, 0.1))
    assert made.verdict("rare semantics get low temperatures, images") == NO
    assert made.verdict("the same with a linear head, rho 2.4, eta 0.02") == SHOWS


@pytest.mark.parametrize(("pairs", "images", "expected"), [(0.6, 0.4, SHOWS), (0.4, 0.4, NO), (0.6, 0.6, NO)])
def test_the_shapes_of_the_temperatures_are_told_by_their_skewness(pairs, images, expected):
    made = Made().seeds("bimodal", "isogclr", [0.5], image=(0.9, pairs, 0.1))
    made.seeds("unimodal", "isogclr", [0.5], sample=(0.9, images, 0.1))
    assert made.verdict("temperatures are near-Gaussian on images, long-tailed on pairs") == expected


@pytest.mark.parametrize(("pairs", "images", "expected"), [(0.1, 0.2, SHOWS), (0.2, 0.1, REVERSED), (0.1, 0.1, NO)])
def test_temperatures_are_smaller_on_pairs_where_every_mean_is(pairs, images, expected):
    made = Made().seeds("bimodal", "isogclr", [0.5], image=(0.9, 0, pairs), text=(0.9, 0, pairs))
    made.seeds("unimodal", "isogclr", [0.5], sample=(0.9, 0, images))
    assert made.verdict("temperatures are smaller on pairs than on images") == expected


@pytest.mark.parametrize(("one", "other", "expected"), [(0.1, 0.2, SHOWS), (-0.1, 0.2, NO), (-0.1, -0.2, REVERSED)])
def test_hot_pairs_are_aligned_where_every_seed_and_side_says_so(one, other, expected):
    made = Made().seeds("bimodal", "isogclr", [0.5], image=(0.9, one, 0.1), text=(0.9, other, 0.1))
    assert made.verdict("hot pairs are aligned") == expected


@pytest.mark.parametrize(("share", "expected"), [(0.55, SHOWS), (0.45, REVERSED), (0.5, EQUIVALENT)])
def test_methods_on_drawings_are_compared_on_them(share, expected):
    made = Made().seeds("bimodal", "isogclr", [0.9]).seeds("bimodal", "clip", [0.1])  # of glyphs
    assert made.verdict("iSogCLR is above CLIP, drawings") == NOT_TESTED
    made.seeds("bimodal", "isogclr", [share], data="drawings").seeds("bimodal", "clip", [0.5], data="drawings")
    assert made.verdict("iSogCLR is above CLIP, drawings") == expected


def test_there_is_no_verdict_on_drawings_within_the_error_of_an_untrained_encoder():
    made = Made().seeds("bimodal", "isogclr", [0.5], data="drawings")
    made.seeds("bimodal", "clip", [0.2], data="drawings")
    assert made.verdict("iSogCLR is above CLIP, drawings") == NOT_CLEAR


@pytest.mark.parametrize(
    ("first", "second", "expected"), [(0.21, 0.9, SHOWS), (0.19, 0.9, NO), (-0.9, -0.21, REVERSED)]
)
def test_near_copies_are_correlated_apart_from_folders(first, second, expected):
    made = Made().seeds("bimodal", "isogclr", [0.5], data="drawings", image=(0.1, first, 0.1), text=(0.1, second, 0.1))
    assert made.verdict("drawings of small folders get low temperatures") == NO
    assert made.verdict("drawings with few near-copies get low temperatures") == expected  # of 100 drawings


def of_batches(claim, **methods):
    made = Made()
    for name, shares in methods.items():
        made.swept(name, dict(zip((16, 256), shares, strict=True)))
    return made.verdict(claim)


def test_a_method_is_held_against_simclr_at_each_batch_size():
    assert of_batches("DeCL is above SimCLR, batch 16", decl=(0.7, 0.6), simclr=(0.5, 0.6)) == SHOWS
    assert of_batches("DeCL is above SimCLR, batch 256", decl=(0.7, 0.5), simclr=(0.5, 0.6)) == REVERSED
    assert of_batches("AUC-CL is above SimCLR, batch 256", auc_cl=(0.7, 0.6), simclr=(0.5, 0.6)) == EQUIVALENT
    assert of_batches("AUC-CL is above SimCLR, batch 64", auc_cl=(0.7, 0.6), simclr=(0.5, 0.6)) == NOT_TESTED


@pytest.mark.parametrize(
    ("decl", "simclr", "expected"),
    [((0.7, 0.6), (0.5, 0.6), SHOWS), ((0.6, 0.6), (0.6, 0.6), EQUIVALENT), ((0.6, 0.7), (0.6, 0.5), REVERSED),
     ((0.6, 0.7), (0.2, 0.5), NOT_CLEAR)],
)  # fmt: skip
def test_gains_at_small_and_large_batches_are_held_against_each_other(decl, simclr, expected):
    assert of_batches("DeCL gains most over SimCLR with small batches", decl=decl, simclr=simclr) == expected


@pytest.mark.parametrize(
    ("auc_cl", "simclr", "expected"),
    [((0.5, 0.5), (0.5, 0.6), SHOWS), ((0.5, 0.5), (0.5, 0.5), SHOWS),
     ((0.5, 0.53), (0.5, 0.6), SHOWS), ((0.5, 0.6), (0.5, 0.53), REVERSED),
     ((0.5, 0.4), (0.5, 0.53), REVERSED), (([0.5 + each for each in SPREAD], 0.5), (0.5, 0.5), UNDECIDED),
     (([0.5 + each for each in SPREAD], 0.5), (0.5, 0.51), UNDECIDED),
     ((0.2, 0.51), (0.5, 0.6), NOT_CLEAR)],
)  # fmt: skip
def test_hardly_depending_on_the_batch_size_is_a_change_that_is_none_or_clearly_less_than_simclrs(
    auc_cl, simclr, expected
):
    assert of_batches("AUC-CL hardly depends on the batch size", auc_cl=auc_cl, simclr=simclr) == expected


def of_values(claim, **shares):
    """The verdict where methods have these shares, in percent, by the plan's values: `isogclr__rho=(60, 61)`."""
    made, values = Made(), {"tau_init": TAUS, "tau": TAUS, "rho": RHOS, "alpha": ALPHAS, "similarity": ("distance",)}
    for words, of_values in shares.items():
        name, _, key = words.rpartition("__")
        for value, share in zip(values[key], of_values, strict=True):
            changed = {f"objective.{key}": value} | ({"objective.tau": 0.5} if key == "similarity" else {})
            for seed in FEW_SEEDS:
                made.add(headline(METHOD["unimodal", name], made.results, seed, changed=changed), share / 100)
    made.seeds("unimodal", "auc_cl", [0.5])
    return made.verdict(claim)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [((50, 51), (60, 50), SHOWS), ((60, 50), (55, 56), REVERSED), ((50, 51), (61, 60), EQUIVALENT)],
)  # fmt: skip
def test_sensitivity_is_how_far_the_best_and_the_worst_value_are_apart(own, other, expected):
    claim = "accuracy depends less on tau_init than SimCLR's on tau"
    assert of_values(claim, isogclr__tau_init=own, simclr__tau=other) == expected


@pytest.mark.parametrize(("shares", "expected"), [((50, 50.4), SHOWS), ((53, 50), REVERSED)])
def test_hardly_depending_on_a_setting_is_within_what_matters(shares, expected):
    assert of_values("accuracy hardly depends on rho", isogclr__rho=shares) == expected


def test_alpha_0_is_no_value_that_auc_cl_is_said_to_be_robust_to():
    assert of_values("AUC-CL hardly depends on alpha", auc_cl__alpha=(1, 50, 50)) == SHOWS
    assert of_values("AUC-CL hardly depends on alpha", auc_cl__alpha=(1, 50, 55)) == REVERSED


@pytest.mark.parametrize(("share", "expected"), [(1, SHOWS), (20, SHOWS), (30, NO)])
def test_collapse_is_a_score_that_is_not_above_an_untrained_encoders(share, expected):
    assert of_values("AUC-CL with alpha = 0 collapses", auc_cl__alpha=(share, 50, 50)) == expected


def test_without_normalised_features_both_have_the_papers_temperature():
    claim = "DeCL is above SimCLR without normalised features"
    assert of_values(claim, decl__similarity=(60,), simclr__similarity=(50,)) == SHOWS
    assert of_values(claim, decl__similarity=(50,), simclr__similarity=(50,)) == EQUIVALENT


@pytest.mark.parametrize(
    ("decl", "simclr", "expected"), [(0.58, 0.5, SHOWS), (0.5, 0.58, REVERSED), (0.55, 0.55, EQUIVALENT)]
)
def test_what_noise_costs_is_held_against_what_it_costs_simclr(decl, simclr, expected):
    made = Made()
    for name, noisy in (("decl", decl), ("simclr", simclr)):
        for changed, share in (({}, 0.6), (NOISY[name], noisy)):
            for seed in FEW_SEEDS:
                made.add(headline(METHOD["unimodal", name], made.results, seed, changed=changed), share)
    assert made.verdict("DeCL loses less to noise of the similarities than SimCLR") == expected


@pytest.mark.parametrize(("grown", "expected"), [((2, 2), SHOWS), ((0.5, 2), NO), ((0.5, 0.5), REVERSED)])
def test_plain_temperatures_grow_where_every_mean_is_above_its_first_value(grown, expected):
    made = Made()
    for number, settings in enumerate(PLAIN_SETTINGS):
        mean = settings["objective.tau_init"] * grown[number % 2]
        made.add(plain(settings), 0.5, image=(0.5, 0.0, mean), text=(0.5, 0.0, mean))
    assert made.verdict("CLIP with a plain learnable temperature per sample does not converge") == expected
