"""Made-up results of the reproduction: searches and baselines, and what a test adds."""

from functools import cache

from reproduction import plan
from reproduction.claims import GROUPS
from reproduction.comparison import BASELINES, Comparison
from reproduction.plan import BATCH, METHOD, METHODS, baseline_run
from reproduction.results import Result, Results, Temperatures
from reproduction.schedule import headline, swept
from reproduction.search import trials

CLAIM = {claim.claim: claim for group in GROUPS for claim in group.claims}


def result(run, share, tau=None):
    """A run with `share` for every score; None: that failed. tau: side -> Spearman's correlation, skewness and mean."""
    variants = {"knn": ["10"], "probe": ["sgd"], "image_to_text": ["1"], "text_to_image": ["1"], "zero_shot": ["top1"]}
    scores = {score: {variant: {"all": share, "tail": share} for variant in of} for score, of in variants.items()}
    sides = {
        side: Temperatures(mean, skewness, [mean] * 11, spearman, 0.0, [1] * 100, [mean] * 100)
        for side, (spearman, skewness, mean) in (tau or {}).items()
    }
    machine = {"cpu": "Abacus", "cores": 2, "gpu": None, "torch": "2"}
    return Result(run, {} if share is None else scores, sides, 60.0, machine, "0", "" if share is not None else "NaN")


def search(method, results, batch=BATCH):
    while new := [run for run in trials(method, results, batch) if run and not results.of(run)]:
        for run in new:
            results.add(result(run, 0.5, {"sample": (0.5, 0.0, 0.1)}))


@cache
def searched(floor):
    results = Results()
    for mode, data in (("unimodal", "long-tailed"), ("bimodal", "long-tailed"), ("unimodal", "balanced")):
        for name in BASELINES:
            results.add(result(baseline_run(mode, data, name), floor))
    for method in METHODS:
        search(method, results)
    for name in ("simclr", "decl, sampled", "auc_cl"):
        for batch in (16, 256):
            search(METHOD["unimodal", name], results, batch)
    return tuple(results)


class Made:
    """Results in which every search and every baseline is made, and what a test adds."""

    def __init__(self, floor=0.2):
        self.results = Results(searched(floor))

    def search(self, method):
        search(method, self.results)

    def add(self, run, share, **tau):
        assert run is not None
        self.results.add(result(run, share, tau))

    def seeds(self, mode, label, shares, *, data="long-tailed", changed=None, **tau):
        """One share stands for all seeds."""
        for seed, share in enumerate(shares * len(plan.SEEDS) if len(shares) == 1 else shares):
            self.add(headline(mode, label, self.results, seed=seed, data=data, changed=changed), share, **tau)
        return self

    def swept(self, name, of_batch):
        for batch, share in of_batch.items():
            self.add(swept(name, batch, "epochs", self.results), share)
        return self

    def verdict(self, claim):
        return CLAIM[claim].judge(Comparison(self.results)).verdict
