"""The reproduction's search and plan: what is tried, what is chosen, what is missing."""

import math
from itertools import product

import pytest

from thermopile.benchmarks.reproduction import page as pages
from thermopile.benchmarks.reproduction import plan
from thermopile.benchmarks.reproduction.comparison import Comparison
from thermopile.benchmarks.reproduction.plan import BATCH, METHOD, METHODS, RATE, Axis, Method
from thermopile.benchmarks.reproduction.results import Results
from thermopile.benchmarks.reproduction.schedule import (
    BESIDE,
    FEW_SEEDS,
    FURTHER_SEEDS,
    NAMES,
    compared,
    headline,
    linear,
    missing,
    parts,
    runs_of,
    swept,
)
from thermopile.benchmarks.reproduction.search import chosen, search

from support.made_results import Made, result


def tried_by(method, score, batch=BATCH, results=None):
    """The search that a method makes where settings have these scores, and its results."""
    results = Results() if results is None else results
    while new := [run for run in search(method, results, batch).runs if run and not results.of(run)]:
        assert chosen(method, results, batch) is None
        for run in new:
            results.add(result(run, score(run.settings)))
    return search(method, results, batch), results


def test_every_method_has_sixteen_trials_the_same_temperatures_and_nothing_that_a_search_might_change():
    for method in METHODS:
        assert method.fixed.keys().isdisjoint(method.axes)
        if method.start:
            continue
        assert len(search(method, Results()).runs) == 16
        assert len(method.grid()) == 12
        tau = method.axes.get("objective.tau")
        assert tau is None or set(tau.values) <= {0.05, 0.1, 0.2, 0.4}


def test_a_search_goes_beyond_the_edge_where_its_best_is_and_then_between():
    """Scores fall off from tau 0.1 and a learning rate of 0.1, beyond the grid's 0.016."""
    method = METHOD["unimodal", "simclr"]

    def score(settings):
        off = abs(math.log2(settings["objective.tau"] / 0.1)) + abs(math.log2(settings[RATE] / 0.1))
        return 0.6 - off / 20

    found, results = tried_by(method, score)
    later = [(settings["objective.tau"], settings[RATE]) for settings in found.tried[12:]]
    assert later == [(0.1, 0.032), (0.1, 0.064), (0.1, 0.128), (0.1, 0.256)]
    assert chosen(method, results) == {"objective.tau": 0.1, RATE: 0.128}
    assert found.at_edge == []


def test_a_best_that_is_still_at_an_edge_is_said_so():
    found, _ = tried_by(METHOD["unimodal", "simclr"], lambda settings: settings[RATE] / 10)
    assert found.at_edge[-1] == RATE
    assert len(found.tried) == 16


def test_neighbours_are_tried_before_halves_and_none_twice_or_beyond_a_limit():
    method = METHOD["unimodal", "auc_cl"]
    best = {"objective.p": 8.0, "objective.a": 10.0, RATE: 8e-3}
    found, _ = tried_by(method, lambda settings: 0.9 if settings.items() >= best.items() else 0.5)
    assert found.tried[12:] == [
        best | {RATE: 16e-3}, best | {"objective.p": 16.0}, best | {"objective.p": 4.0}, best | {"objective.a": 3.162}
    ]  # fmt: skip
    assert found.at_edge == []


def test_a_setting_on_a_scale_of_logarithms_is_shifted_and_one_without_an_order_has_no_neighbours():
    assert [Axis((0.7,), limits=(0, 4.6), shift=0.7).beside(0.7, power) for power in (1, -1, -2)] == [1.4, 0.0, None]
    assert Axis(("sample", "mean"), 0).beside("mean", 1) is None


def test_a_search_is_of_the_development_set_alone_at_the_length_of_the_compared_runs():
    for method in METHODS:
        for run in search(method, Made().results).runs:
            assert run is None or (run.data == "development" and run.settings["epochs"] == plan.EPOCHS[method.mode])
    made = Made()
    before = chosen(METHOD["unimodal", "decl"], made.results)
    made.seeds("unimodal", "decl", [0.9])
    assert chosen(METHOD["unimodal", "decl"], made.results) == before


def test_a_training_that_failed_is_never_chosen():
    method = METHOD["unimodal", "sogclr"]
    found, results = tried_by(method, lambda settings: None if settings["objective.tau"] < 0.4 else 0.01)
    assert chosen(method, results)["objective.tau"] >= 0.4
    assert len(found.tried) == 16


def test_another_batch_size_and_a_linear_head_begin_from_what_was_chosen_and_have_eight_trials():
    method, results = METHOD["unimodal", "simclr"], Results()
    assert search(method, results, 256) is None
    assert search(linear("simclr"), results) is None
    tried_by(method, lambda settings: settings["objective.tau"] / 2, results=results)
    start = chosen(method, results)
    for other, batch in ((method, 256), (linear("simclr"), BATCH)):
        found, _ = tried_by(other, lambda settings: 0.5, batch, results)
        assert found.tried[0] == start
        assert len(found.tried) == 8
    assert chosen(method, results) == start


def test_a_method_beside_the_others_begins_from_simclrs_choice_and_has_eight_trials():
    made = Made()
    for name in BESIDE:
        found = search(METHOD["unimodal", name], made.results)
        assert found.is_done
        assert len(found.tried) == 8
        assert found.tried[0][RATE] == chosen(METHOD["unimodal", "simclr"], made.results)[RATE]
    assert search(METHOD["unimodal", "dcl"], Results()) is None


def test_a_batch_size_takes_the_settings_of_its_search():
    made = Made()
    assert swept("simclr", BATCH, 3, made.results) == headline(METHOD["unimodal", "simclr"], made.results, 3)
    for batch, at in ((16, 16), (32, 16), (64, BATCH), (256, 256)):
        run = swept("decl", batch, 0, made.results)
        settings = chosen(METHOD["unimodal", "decl"], made.results, at)
        assert (run.settings["batch_size"], run.settings["epochs"]) == (batch, 16)
        assert run.settings.items() >= settings.items()


def test_all_methods_on_images_have_one_head_and_the_linear_one_beside_it():
    for name in NAMES["unimodal"]:
        assert {run.settings["model.head"] for run in search(METHOD["unimodal", name], Results()).runs if run} == {
            "simclr_bn"
        }
    labels = [method.label for method in compared("unimodal")]
    assert labels[8:] == [f"{label}, linear head" for label in labels[:5]]


def test_the_plan_counts_runs_that_are_not_known_yet_and_makes_a_run_of_two_parts_once():
    everything = parts(full=True)
    none_made, all_searched = missing(everything, Results()), missing(everything, Made().results)
    assert len(none_made) == sum(len([*part.runs(Results())]) for part in everything)
    twice = len(FEW_SEEDS)  # iSogCLR's tau_init of 0.1 is also that of the compared runs
    assert len(none_made) - len(all_searched) == len(Made().results) + twice
    known = [run.key for run in all_searched]
    assert len(set(known)) == len(known)
    short = {run.key for run in missing(parts(full=False), Results()) if run}
    assert short < {run.key for run in none_made if run}


def test_nothing_is_missing_once_every_run_is_made():
    made = Made()
    for run in missing(parts(full=True), made.results):
        made.results.add(result(run, 0.5, {"sample": (0.5, 0.0, 0.1)}))
    assert missing(parts(full=True), made.results) == []
    text = pages.to_markdown(made.results, {})
    for words in ("not yet", "not run yet", "not searched yet", "not tested"):
        assert words not in text


def test_three_methods_on_images_have_further_seeds_and_are_compared_by_those_that_both_have():
    made = Made().seeds("unimodal", "isogclr", [0.4, 0.6, 0.45, 0.55, 0.5]).seeds("unimodal", "simclr", [0.5])
    made.seeds("unimodal", "sogclr", [0.3]).seeds("unimodal", "decl", [0.3])
    for name, seed in product(("isogclr", "simclr"), FURTHER_SEEDS):
        made.add(headline(METHOD["unimodal", name], made.results, seed), 0.6 if name == "isogclr" else 0.4)
    asked = [run for run in missing(parts(full=True), made.results) if run and run.settings["seed"] in FURTHER_SEEDS]
    on_images = [run.settings["objective.name"] for run in asked if run.settings["objective.mode"] == "unimodal"]
    assert on_images == ["sogclr"] * 5
    runs = Comparison(made.results)
    own, other, third = (runs.seeds(METHOD["unimodal", name]) for name in ("isogclr", "simclr", "sogclr"))
    assert (len(own), len(other), len(third)) == (10, 10, 5)
    assert runs.gap(own, other).points == pytest.approx(10)
    assert runs.gap(own, third).points == pytest.approx(20)  # of the five seeds that both have


def test_the_plan_is_of_480_trainings():
    assert len([*runs_of(parts(full=True), Made().results)]) == 480 + len([*parts(full=True)[0].runs(Results())])


def test_what_is_made_is_not_missing():
    made = Made()
    before = {run.key for run in missing(parts(full=True), made.results)}
    run = headline(METHOD["unimodal", "simclr"], made.results, 0)
    made.add(run, 0.7)
    assert before - {run.key for run in missing(parts(full=True), made.results)} == {run.key}


@pytest.mark.parametrize(
    "method", [method for method in METHODS if not method.start], ids=lambda method: f"{method.mode}-{method.name}"
)
def test_a_search_ends_wherever_its_best_is(method: Method):
    for corner in (min, max):
        ends = {key: corner(axis.values) for key, axis in method.axes.items()}
        found, _ = tried_by(method, lambda settings, ends=ends: 0.9 if settings.items() >= ends.items() else 0.5)
        assert found.is_done
