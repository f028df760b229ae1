"""The reproduction's search and plan: what is tried, what is chosen, what is missing."""

import numpy as np
import pytest

from made_results import Made, result
from reproduction import page as pages
from reproduction import plan
from reproduction.plan import BATCH, METHOD, METHODS, RATE
from reproduction.results import Results
from reproduction.schedule import best_headline, headline, missing, optimized, parts, swept, with_optimizer
from reproduction.search import chosen, trials


def test_every_search_has_eight_trials_and_every_softmax_the_same_temperatures():
    for method in METHODS:
        assert len(trials(method, Results())) == (6 if method.for_tau else 8)
        taus = method.grid.get("objective.tau")
        assert taus in (None, (0.1, 0.3, 0.5))
        assert {settings[RATE] for settings in method.candidates()} in ({0.001, 0.004}, {0.004})


def test_a_search_climbs_until_its_learning_rate_is_between_two_others():
    """Scores fall off from tau 0.3 and a learning rate of 0.016, which is not on the grid."""
    method, results, rates = METHOD["unimodal", "simclr"], Results(), []
    while new := [run for run in trials(method, results) if run and not results.of(run)]:
        assert chosen(method, results) is None
        for run in new:
            rates.append(run.settings[RATE])
            off = abs(run.settings["objective.tau"] - 0.3) + abs(np.log2(run.settings[RATE] / 0.016)) / 20
            results.add(result(run, 0.6 - off))
    assert chosen(method, results) == {"objective.tau": 0.3, RATE: 0.016}
    assert sorted(set(rates)) == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032]
    assert len(rates) == len(results) == 10


def test_a_search_is_of_the_development_set_alone_at_the_length_of_the_compared_runs():
    for method in METHODS:
        for run in trials(method, Results()):
            assert run is None or (run.data == "development" and run.settings["epochs"] == plan.EPOCHS[method.mode])
    made = Made()
    before = chosen(METHOD["unimodal", "decl, mean"], made.results)
    made.seeds("unimodal", "decl, mean", [0.9, 0.9, 0.9])
    assert chosen(METHOD["unimodal", "decl, mean"], made.results) == before


def test_the_search_for_temperatures_goes_by_their_correlation_with_class_size():
    method, results = METHOD["unimodal", "isogclr, for tau"], Results()
    for run in trials(method, results):
        share, rho = run.settings["objective.gamma"], run.settings["objective.rho"]
        results.add(result(run, share, {"sample": (rho, 0.0, 0.1)}))
    assert chosen(method, results)["objective.rho"] == 3.2


def test_a_training_for_temperatures_that_failed_is_not_chosen():
    method, results = METHOD["unimodal", "isogclr, for tau"], Results()
    for number, run in enumerate(trials(method, results)):
        results.add(result(run, 0.5 if number else None, {"sample": (0.5, 0.0, 0.1)} if number else None))
    assert chosen(method, results) == method.candidates()[1]


def test_a_training_that_failed_is_never_chosen():
    method, results = METHOD["unimodal", "sogclr"], Results()
    while new := [run for run in trials(method, results) if run and not results.of(run)]:
        for run in new:
            results.add(result(run, None if run.settings["objective.tau"] < 0.5 else 0.01))
    assert chosen(method, results)["objective.tau"] == 0.5


def test_a_batch_size_is_searched_again_or_keeps_the_settings_with_a_rate_by_the_root_of_the_batch():
    made = Made()
    again = swept("simclr", 32, "epochs", made.results)
    assert again.settings[RATE] == chosen(METHOD["unimodal", "simclr"], made.results, 16)[RATE]
    kept = swept("sogclr", 32, "steps", made.results)
    assert kept.settings[RATE] == pytest.approx(chosen(METHOD["unimodal", "sogclr"], made.results)[RATE] / 2)
    assert (again.settings["epochs"], kept.settings["epochs"]) == (16, 4)
    assert swept("simclr", BATCH, "epochs", made.results) == headline("unimodal", "simclr", made.results)


def test_of_several_forms_the_one_that_the_search_prefers_is_held_against_others():
    made = Made()
    assert best_headline("unimodal", "isogclr", made.results) == headline("unimodal", "isogclr", made.results)
    wide = next(run for run in trials(METHOD["unimodal", "isogclr, wide"], made.results) if run)
    made.add(wide, 0.51)
    made.search(METHOD["unimodal", "isogclr, wide"])
    preferred = best_headline("unimodal", "isogclr", made.results)
    assert preferred == headline("unimodal", "isogclr, wide", made.results)
    assert preferred.settings["objective.gamma"] == 0.2


def test_an_optimiser_keeps_all_of_fastclip_v3_but_its_learning_rate_and_decay():
    made = Made()
    own = chosen(METHOD["bimodal", "fastclip_v3"], made.results)
    method = with_optimizer("lion", made.results)
    assert all(method.fixed[key] == value for key, value in own.items() if key != RATE)
    assert len(method.candidates()) == 3
    assert optimized("lion", 0, made.results) is None


def test_the_plan_counts_runs_that_are_not_known_yet_and_makes_a_run_of_two_parts_once():
    everything = parts(full=True)
    shared = len(METHOD["unimodal", "isogclr, wide"].candidates())  # the grid of `isogclr, for tau` as well
    assert len(missing(everything, Results())) == sum(len([*part.runs(Results())]) for part in everything) - shared
    known = [run.key for run in missing(everything, Made().results) if run]
    assert len(set(known)) == len(known)
    short = {run.key for run in missing(parts(full=False), Results()) if run}
    assert short < {run.key for run in missing(everything, Results()) if run}


def test_nothing_is_missing_once_every_run_is_made():
    made = Made()
    while new := [run for run in missing(parts(full=True), made.results) if run]:
        for run in new:
            made.results.add(result(run, 0.5, {"sample": (0.5, 0.0, 0.1)}))
    assert missing(parts(full=True), made.results) == []
    text = pages.to_markdown(made.results, {})
    assert "runs are made; not yet" not in text
    assert "not run yet" not in text
    assert "not searched yet" not in text


def test_what_is_made_is_not_missing():
    made = Made()
    before = {run.key for run in missing(parts(full=True), made.results) if run}
    run = headline("unimodal", "simclr", made.results)
    made.add(run, 0.7)
    assert before - {run.key for run in missing(parts(full=True), made.results) if run} == {run.key}
