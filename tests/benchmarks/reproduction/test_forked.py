"""The plan of forks: what each forgets, and of which run it is a fork; and the page made of their results."""

from pathlib import Path

import numpy as np
import pytest

from thermopile.benchmarks.reproduction.forked import (
    END,
    POINTS,
    QUARTER,
    SEEDS,
    WITHOUT,
    chosen_class,
    forgotten,
    forked,
    origin_of,
    parts,
)
from thermopile.benchmarks.reproduction.forked_page import to_markdown, write_page
from thermopile.benchmarks.reproduction.results import Results
from thermopile.benchmarks.reproduction.schedule import missing, runs_of
from thermopile.benchmarks.reproduction.sets import train_source
from thermopile.benchmarks.reproduction.wrong import ISOGCLR
from thermopile.benchmarks.reproduction.wrong import parts as parts_on_wrong_captions

from support.made_results import result

CHECKOUT = Path(__file__).parents[3]
REPRODUCTION, DOCS = CHECKOUT / "benchmarks/reproduction", CHECKOUT / "docs"


@pytest.fixture(scope="module")
def searched():
    """Results of the search on wrong captions."""
    results = Results()
    of_search = parts_on_wrong_captions()[:1]
    while new := [run for run in missing(of_search, results) if run]:
        for run in new:
            results.add(result(run, 1 - run.settings["optimizer.lr"]))
    return results


class Train:
    """A dataset whose samples are the source's in reverse."""

    shards = 1

    def shard(self, number):
        return self

    def records(self):
        return {"source_index": np.arange(10_847)[::-1]}


@pytest.fixture(scope="module")
def sources(searched):
    """The source, and what it would be without wrong captions; in the order of Train."""
    run = forked(searched, 0, END, "")
    return [[*train_source(data).captions(np.arange(10_847)[::-1])] for data in (run.data, "long-tailed")]


def test_there_are_five_seeds_of_sixteen_forks_and_the_run_as_it_was(searched):
    assert len(runs_of(parts(), searched)) == SEEDS * (1 + len(POINTS) * len(WITHOUT))
    assert {run.settings["seed"] for run in runs_of(parts(), searched)} == set(range(SEEDS))


def test_forks_of_one_seed_have_one_origin_which_keeps_every_point(searched):
    origins = {origin_of(forked(searched, 3, at, without)).key for at in POINTS for without in WITHOUT}
    assert len(origins) == 1
    settings = origin_of(forked(searched, 3, END, "")).settings
    assert settings["objective.name"] == ISOGCLR.fixed["objective.name"]
    assert 10_847 // 8 // 16 * settings["epochs"] == 4 * QUARTER


@pytest.mark.wide
def test_a_fork_forgets_all_wrong_captions_or_as_many_at_random_or_a_class_or_one(searched, sources):
    ids = {without: forgotten(forked(searched, 1, 50, without), Train()) for without in WITHOUT}
    given, meant = map(np.array, sources)
    np.testing.assert_array_equal(ids["swapped"], np.flatnonzero(given != meant))
    assert len(np.unique(ids["random"])) == len(ids["swapped"]) == round(0.2 * 10_847)
    of_sample = train_source("long-tailed").groups().of_sample[::-1]
    np.testing.assert_array_equal(ids["class"], np.flatnonzero(of_sample == chosen_class("long-tailed@20")))
    assert len(ids["one"]) == 1
    other_seed = forgotten(forked(searched, 2, 50, "random"), Train())
    assert set(other_seed) != set(ids["random"])


def test_a_page_without_results_says_so(searched):
    page = " ".join(to_markdown(searched, "forks.png").split())
    assert f"0 of {SEEDS * 17} forks so far" in page
    assert "| one sample | – | – | – | – |" in page


@pytest.fixture(scope="module")
def committed():
    """Results of the forks, and the settings that were searched for them."""
    results = Results.read(REPRODUCTION / "forks.jsonl")
    results.take_searches(Results.read(REPRODUCTION / "wrong_captions.jsonl"))
    return results


def test_the_words_of_the_committed_page_are_those_of_the_committed_forks(committed):
    assert {each.run.key for each in committed} == {run.key for run in runs_of(parts(), committed)}
    assert to_markdown(committed, "forks.png") == (DOCS / "forks.md").read_text("utf-8")


@pytest.mark.wide
def test_the_committed_picture_is_that_of_the_committed_forks_byte_by_byte(committed, tmp_path):
    write_page(committed, tmp_path / "forks.md")
    assert (tmp_path / "forks.png").read_bytes() == (DOCS / "forks.png").read_bytes()
