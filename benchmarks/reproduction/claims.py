"""What the papers claim, and what a comparison has to say about it. Verdicts are computed, never written."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from reproduction.plan import Mode
from reproduction.results import LINEAR, RETRIEVAL, ZERO_SHOT, Estimate, Measure, Results, difference

SHOWS = "shows"
NOISE = "does not show: within noise"
REVERSED = "does not show: the reverse does"
NO = "does not show"
NOT_TESTED = "not tested"

NOT_RUN = "the runs that would say so were not made"
ONE_BATCH_SIZE = "one batch size was run; `make reproduce FULL=1` has two"
LONG_TAIL = 0.5
"""Skewness from which a distribution counts as skewed."""


class Finding(NamedTuple):
    """What was seen of a claim."""

    seen: str
    """Or, where it was not tested, why."""
    verdict: str


class Claim(NamedTuple):
    """A claim of a paper."""

    claim: str
    source: str
    reported: str
    """The paper's own figures, in points of 100, and on what."""
    check: Callable[[Results], Finding] | str
    """How the runs test it, or why they cannot."""

    def judge(self, results: Results) -> Finding:
        return Finding(self.check, NOT_TESTED) if isinstance(self.check, str) else self.check(results)


def verdict(estimate: Estimate) -> str:
    """Of the claim that a figure is above 0."""
    if abs(estimate.points) <= estimate.noise:
        return NOISE
    return SHOWS if estimate.points > 0 else REVERSED


def _above(mode: Mode, better: str, worse: str, measure: Measure) -> Callable[[Results], Finding]:
    """The claim that a method is above another on the whole test set, at the smallest batch size."""

    def check(results: Results) -> Finding:
        batch_size = min(results.batch_sizes(mode), default=0)
        if (gap := results.gap(mode, better, worse, batch_size, measure)) is None:
            return Finding(NOT_RUN, NOT_TESTED)
        tail = fmean(results.shares(mode, better, batch_size, measure, "tail")) - fmean(
            results.shares(mode, worse, batch_size, measure, "tail")
        )
        seen = f"{measure.label}, batch {batch_size}: {signed(gap)}; in the tail {_points(100 * tail)}"
        return Finding(seen, verdict(gap))

    return check


def _most_at_small_batches(results: Results) -> Finding:
    if (gaps := _at_two_batch_sizes(results, lambda b: results.gap("unimodal", "decl", "simclr", b, LINEAR))) is None:
        return Finding(ONE_BATCH_SIZE, NOT_TESTED)
    small, large = gaps
    return Finding(f"gain {signed(small)} with the smallest batches, {signed(large)} with the largest",
                   verdict(difference(small, large)))  # fmt: skip


def _hardly_depends_on_batch(results: Results) -> Finding:
    if (means := _at_two_batch_sizes(results, lambda b: results.mean("unimodal", "auc_cl", b, LINEAR))) is None:
        return Finding(ONE_BATCH_SIZE, NOT_TESTED)
    small, large = means
    change = difference(large, small)
    held = verdict(change) == NOISE
    return Finding(f"{signed(change)} from the smallest batches to the largest", SHOWS if held else NO)


def _at_two_batch_sizes(results: Results, figure: Callable[[int], Estimate | None]) -> tuple[Estimate, Estimate] | None:
    """The figure with the smallest and the largest batches; None where there is one batch size."""
    batch_sizes = results.batch_sizes("unimodal")
    if len(batch_sizes) < 2 or (small := figure(batch_sizes[0])) is None or (large := figure(batch_sizes[-1])) is None:
        return None
    return small, large


def _rare_is_cold(mode: Mode) -> Callable[[Results], Finding]:
    """The claim that tau grows with class size, in every run and side: Spearman's correlation beside chance's."""

    def check(results: Results) -> Finding:
        runs = [result for result in results.every if result.run.method.mode == mode]
        found = [side.spearman for result in runs for side in result.temperatures.values() if side.spearman is not None]
        if not found:
            return Finding(NOT_RUN, NOT_TESTED)
        chance = 2 / math.sqrt(sum(runs[0].classes_of_band.values()) - 1)
        held = SHOWS if min(found) > chance else REVERSED if max(found) < -chance else NOISE
        return Finding(f"Spearman {min(found):+.2f} to {max(found):+.2f}; chance gives up to ±{chance:.2f}", held)

    return check


def _long_tail_on_pairs(results: Results) -> Finding:
    """Skewness of iSogCLR's temperatures: that of pairs above that of images, which is to be that of a normal one."""
    skewness = {
        mode: [side.skewness for batch in results.batch_sizes(mode) for result in results.of(mode, "isogclr", batch)
               for side in result.temperatures.values()]
        for mode in ("bimodal", "unimodal")
    }  # fmt: skip
    pairs, images = skewness["bimodal"], skewness["unimodal"]
    if not pairs or not images:
        return Finding(NOT_RUN, NOT_TESTED)
    seen = (
        f"skewness {min(pairs):+.2f} to {max(pairs):+.2f} on pairs, {min(images):+.2f} to {max(images):+.2f} on images"
    )
    tails = min(pairs) > LONG_TAIL and max(map(abs, images)) <= LONG_TAIL
    return Finding(seen, SHOWS if tails else NO)


def signed(estimate: Estimate) -> str:
    return f"{_points(estimate.points)} ± {estimate.noise:.1f}"


def _points(points: float) -> str:
    return f"{points:+.1f}".replace("-", "−")


CLAIMS = (
    Claim("iSogCLR is above SimCLR in linear accuracy", "iSogCLR, Table 1 (400 epochs)",
          "CIFAR100 63.82, 62.34; CIFAR100-LT 53.06, 49.33; CIFAR10-LT 78.37, 77.09; iNaturalist 93.08, 91.52",
          _above("unimodal", "isogclr", "simclr", LINEAR)),
    Claim("SogCLR lies between the two in linear accuracy", "iSogCLR, Table 1",
          "CIFAR100 63.14; CIFAR100-LT 52.35; CIFAR10-LT 77.70; iNaturalist 92.60",
          "no unimodal SogCLR among the runs"),
    Claim("the gain over SimCLR is larger on long-tailed data", "iSogCLR, Table 1",
          "of SimCLR's accuracy: 2.4 % on CIFAR100, 7.6 % on CIFAR100-LT",
          "there is one training set, a long-tailed one, and no balanced one of its size"),
    Claim("iSogCLR is above CLIP in retrieval", "iSogCLR, Table 2 (CC3M)",
          "Flickr30K, text found for an image, R@1: 60.20, 50.90",
          _above("bimodal", "isogclr", "clip", RETRIEVAL)),
    Claim("iSogCLR is above SogCLR in retrieval", "iSogCLR, Table 2 (CC3M)",
          "Flickr30K, as above: 60.20, 57.18", _above("bimodal", "isogclr", "sogclr", RETRIEVAL)),
    Claim("SogCLR is above CLIP in retrieval", "iSogCLR, Table 2 (CC3M)",
          "Flickr30K, as above: 57.18, 50.90", _above("bimodal", "sogclr", "clip", RETRIEVAL)),
    Claim("iSogCLR is above CLIP in zero-shot accuracy", "iSogCLR, Table 2 (CC3M)",
          "ImageNet: 40.72, 36.27 (SogCLR 37.46)", _above("bimodal", "isogclr", "clip", ZERO_SHOT)),
    Claim("rare semantics get low temperatures, on images", "iSogCLR, Figure 5",
          "CIFAR100-LT: shares of the classes among the coldest and hottest samples", _rare_is_cold("unimodal")),
    Claim("rare semantics get low temperatures, on pairs", "iSogCLR, Figure 6",
          "CC3M: shown by examples", _rare_is_cold("bimodal")),
    Claim("temperatures are near-Gaussian on images and have a long tail on pairs", "iSogCLR, Figures 8, 9",
          "shown by histograms", _long_tail_on_pairs),
    Claim("the last temperatures do not depend on tau_init", "iSogCLR, Figure 8",
          "shown by histograms", "every method has one first temperature"),
    Claim("CLIP with a plain learnable temperature per sample diverges", "iSogCLR, appendix C.3",
          "the mean temperature keeps growing", "no objective here does that"),
    Claim("a cosine of gamma is better than a constant one", "FastCLIP, Table 3",
          "Datacomp +0.7 to +2.1", "gamma is constant in every run"),
    Claim("FastCLIP-v3 is the best version at large scale", "FastCLIP, Table 4",
          "Datacomp, CC12M: v3 31.60, v0 31.47, v2 30.95, v1 30.65",
          "of 9.1 million pairs, where these are some ten thousand; and of the versions v3 alone was run"),
    Claim("AdamW is above Lion, Lion above LAMB, LAMB above SGD with momentum", "FastCLIP, Table 5",
          "Datacomp, CC3M: 24.76, 24.50, 22.63, 22.25", "every run has AdamW"),
    Claim("FastCLIP-v3 is above OpenCLIP at every number of nodes", "FastCLIP, Figure 2, Table 12",
          "Datacomp +2.7 to +3.7",
          _above("bimodal", "fastclip_v3", "clip", RETRIEVAL)),
    Claim("FastCLIP communicates less on 4 to 8 nodes", "FastCLIP, Figure 3", "shown by timings", "one process"),
    Claim("DeCL is above SimCLR", "DeCL, Table 1 (CIFAR-10, 200 epochs)",
          "batch 64: 83.8, 79.6; 512: 86.4, 84.9", _above("unimodal", "decl", "simclr", LINEAR)),
    Claim("DeCL gains most over SimCLR with small batches", "DeCL, Table 1", "as above", _most_at_small_batches),
    Claim("AUC-CL is above SimCLR", "AUC-CL, Table 5 (ImageNet-100, 400 epochs)",
          "batches of 128 to 512: 82.7 to 82.8, 75.7 to 76.1", _above("unimodal", "auc_cl", "simclr", LINEAR)),
    Claim("AUC-CL hardly depends on the batch size", "AUC-CL, Table 5",
          "82.7 to 82.8 (SimCLR 75.7 to 76.1, SogCLR 79.3 to 78.2)", _hardly_depends_on_batch),
    Claim("AUC-CL with alpha = 0 collapses", "AUC-CL, Table 11", "10 on CIFAR-10, which is chance",
          "alpha is above 0 in every run"),
)  # fmt: skip
