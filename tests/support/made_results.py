"""Made-up results of the reproduction: searches and baselines, and what a test adds."""

from functools import cache

import numpy as np

from thermopile.benchmarks.reproduction.claims import GROUPS
from thermopile.benchmarks.reproduction.comparison import BASELINES, Comparison
from thermopile.benchmarks.reproduction.plan import BATCH, METHOD, METHODS, baseline_run
from thermopile.benchmarks.reproduction.results import BANDS, Result, Results, Temperatures
from thermopile.benchmarks.reproduction.schedule import DRAWN, IMAGES, SEEDS, SWEPT, headline, linear, seeds_of, swept
from thermopile.benchmarks.reproduction.search import search
from thermopile.benchmarks.reproduction.sets import test_samples as number_of_test_samples

CLAIM = {claim.claim: claim for group in GROUPS for claim in group.claims}
SAMPLES = number_of_test_samples("long-tailed")
PARTS = ("knn", "probe", "zero_shot", "image_to_text", "text_to_image")


def result(run, share, tau=None, commit="c0ffee"):
    """A run with `share` for every score; None: that failed. tau: side -> Spearman's correlation, skewness and mean.

    The skewness is the correlation with similarities and with near-copies too.
    """
    scores = {} if share is None else {part: dict.fromkeys(BANDS, share) for part in PARTS}
    sides = {
        side: Temperatures(mean, skewness, 0.0, [mean] * 11, spearman, 0.0, [1] * 100, [mean] * 100, skewness, skewness)
        for side, (spearman, skewness, mean) in (tau or {}).items()
    }
    machine = {"cpu": "Abacus", "cores": 2, "gpu": None, "torch": "2"}
    return Result(run, scores, sides, 60.0, machine, "0", commit, "" if share is not None else "NaN")


def right(share, samples=SAMPLES):
    """That share of the test samples, spread evenly; those of a smaller share are among those of a larger one."""
    return {} if share is None else dict.fromkeys(PARTS, np.arange(samples) % 1000 < round(1000 * share))


class MadeResults(Results):
    """Results whose test samples follow from the score."""

    def right(self, result, part, samples):
        return right(result.scores[part]["all"] if result.scores else 0.0, samples)[part]


def search_all(method, results, batch=BATCH):
    while new := [run for run in search(method, results, batch).runs if run and not results.of(run)]:
        for run in new:
            results.add(result(run, 0.5))


@cache
def searched(floor):
    results = Results()
    for mode, data in (("unimodal", "long-tailed"), ("bimodal", "long-tailed"), ("unimodal", "balanced")):
        for name in BASELINES:
            results.add(result(baseline_run(mode, data, name), floor))
    results.add(result(baseline_run("bimodal", "drawings", "untrained"), floor))
    for method in (*METHODS, *DRAWN):
        search_all(method, results)
    for name in IMAGES:
        search_all(linear(name), results)
    for name in SWEPT:
        for batch in (16, 256):
            search_all(METHOD["unimodal", name], results, batch)
    return tuple(results)


class Made:
    """Results in which every search and every baseline is made, and what a test adds."""

    def __init__(self, floor=0.2):
        self.results = MadeResults(searched(floor))

    def add(self, run, share, **tau):
        assert run is not None
        self.results.add(result(run, share, tau))

    def seeds(self, mode, name, shares, *, data=None, head=None, **tau):
        """One share stands for all seeds."""
        drawn = {method.name: method for method in DRAWN}
        method = drawn[name] if data == "drawings" else linear(name) if head == "linear" else METHOD[mode, name]
        for seed, share in enumerate(shares * len(seeds_of(method)) if len(shares) == 1 else shares):
            self.add(headline(method, self.results, seed, data=data), share, **tau)
        return self

    def swept(self, name, of_batch):
        """of_batch: batch size -> a share for all seeds, or one for each."""
        for batch, shares in of_batch.items():
            for seed in SEEDS["unimodal"]:
                self.add(swept(name, batch, seed, self.results), shares if np.isscalar(shares) else shares[seed])
        return self

    def verdict(self, claim):
        return CLAIM[claim].judge(Comparison(self.results)).verdict
