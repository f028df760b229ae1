"""The plan of the comparison on data with wrong captions: the same search for all, then the same data and seeds."""

import re
from collections import Counter
from pathlib import Path

import pytest

from thermopile.benchmarks.reproduction.results import Results
from thermopile.benchmarks.reproduction.schedule import missing, runs_of
from thermopile.benchmarks.reproduction.search import search
from thermopile.benchmarks.reproduction.wrong import (
    CLIP,
    CLIP_DOUBT,
    ISOGCLR,
    ISOGCLR_DOUBT,
    METHODS,
    SOGCLRS,
    compared,
    divided,
    parts,
    rival,
)
from thermopile.benchmarks.reproduction.wrong_page import Found, to_markdown

from support.made_results import MadeResults, result

CHECKOUT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def searched():
    """Results of all searches, and the settings that each method is to use: those with the lowest learning rate."""
    results = Results()
    of_search = [part for part in parts() if part.name.startswith("search")]
    while new := [run for run in missing(of_search, results) if run]:
        for run in new:
            results.add(result(run, 1 - run.settings["optimizer.lr"]))
    return results


def test_every_method_is_searched_alike_where_captions_are_wrong(searched):
    for method in (*METHODS, *SOGCLRS):
        runs = search(method, searched).runs
        assert len({run.key for run in runs}) == 12, method.name
        assert {run.data for run in runs} == {"development@40"}
        for run in runs:
            after = run.settings.get("objective.doubt_after")
            assert (after is None) == ("doubt" not in method.name)
            assert isinstance(run.settings["epochs"], int)
            assert after is None or isinstance(after, int)


def test_there_are_at_most_250_runs_and_none_that_is_compared_is_known_before_the_searches(searched):
    unknown = runs_of(parts(), Results())
    assert len(unknown) == len(runs_of(parts(), searched)) <= 250
    assert {run.data for run in unknown if run} == {"development@40"}


def test_methods_are_compared_on_the_same_data_with_the_same_seeds(searched):
    runs = [run for run in missing(parts(), searched) if run]
    on = Counter((run.data, run.settings["objective.name"], "objective.doubt_after" in run.settings)
                 for run in runs if not {"division.after", "curated"} & run.settings.keys())  # fmt: skip
    few = "sogclr"
    for data, seeds in {"long-tailed": 5, "long-tailed@20": 3, "long-tailed@40": 5, "long-tailed@60": 3}.items():
        assert {count for (where, name, _), count in on.items() if where == data and name != few} == {seeds}
        assert sum(where == data and name != few for where, name, _ in on) == len(METHODS)
    assert {key: count for key, count in on.items() if key[1] == few} == dict.fromkeys(
        [("long-tailed@40", few, False), ("long-tailed@40", few, True)], 3
    )
    for data in ("drawings", "emoji", "drawings@40", "emoji@40"):
        assert {count for (where, *_), count in on.items() if where == data} == {5}
    oracles = {data for data, *_ in on if data.endswith("-right")}
    assert oracles == {f"{name}-right" for name in ("long-tailed@20", "long-tailed@40", "long-tailed@60",
                                                    "drawings@40", "emoji@40")}  # fmt: skip


def test_the_rival_has_the_settings_that_doubt_was_chosen_with_and_then_trials_of_its_own(searched):
    for method in (CLIP_DOUBT, ISOGCLR_DOUBT):
        first = search(rival(method, searched), searched).tried[0]
        start = search(method, searched).best
        assert {key: value for key, value in start.items() if key != "objective.doubt_after"} == {
            key: value for key, value in first.items() if key != "division.after"
        }
        assert len(search(rival(method, searched), searched).tried) == 5
        run = divided(method, searched, 40, 0)
        assert run.data == "long-tailed@40"
        assert "objective.doubt_after" not in run.settings
    assert rival(CLIP_DOUBT, Results()) is divided(CLIP_DOUBT, Results(), 40, 0) is None


def test_what_was_chosen_on_glyphs_is_used_on_emoji_for_as_long_as_drawings_take(searched):
    on_glyphs, on_emoji = (compared(ISOGCLR._replace(on=on), searched, 40, 3) for on in ("glyphs", "emoji"))
    changed = {key for key in on_glyphs.settings if on_glyphs.settings[key] != on_emoji.settings[key]}
    assert changed == {"epochs"}
    assert on_emoji.settings["epochs"] == 64
    assert compared(ISOGCLR, Results(), 40, 3) is None


def test_the_page_has_every_score_and_how_far_doubt_goes_towards_the_right_pairs_alone(searched):
    results = MadeResults(searched)

    def score(run):
        if run.data.endswith("-right") or "@" not in run.data:
            return 0.6
        return 0.5 if "objective.doubt_after" in run.settings else 0.4

    for run in missing(parts(), results):
        results.add(result(run, score(run)))
    page = to_markdown(Found(results), "picture.png")
    assert "| iSogCLR with doubt, of that |  | 100% | 83% | 83% | 83% |" in page
    of_emoji = re.search(r"\| emoji, 40 % wrong (.*)", page)[1]
    assert re.findall(r"([\d.]+) ±", of_emoji) == ["66.7", "66.7", "83.3", "100.0", "16.7"]  # of 600 samples
    assert of_emoji.endswith("| 50% |")
    assert "changes iSogCLR on glyphs by +0.0 ± 0.0" in " ".join(page.split())
    rates = [tried["optimizer.lr"] for tried in search(CLIP, results).tried if not tried["objective.learned"]]
    assert f"| CLIP, its temperature fixed | {100 - 100 * min(rates):.1f} |" in page
    assert "249 runs, of commit c0ffee" in " ".join(page.split())


def test_the_words_of_the_committed_page_are_those_of_the_committed_runs():
    results = Results.read(CHECKOUT / "benchmarks/reproduction/wrong_captions.jsonl")
    page = (CHECKOUT / "docs/wrong_captions.md").read_text("utf-8")
    assert to_markdown(Found(results), "wrong_captions.png") == page
