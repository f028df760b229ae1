"""The temperature at which a sample's weights lie as far from uniform as rho allows, solved from features.

Where the moving average s is exact, a temperature comes to rest where the Kullback–Leibler divergence of its weights
q = softmax(h / tau) from uniform is rho (iSogCLR eq 7 and 13: G = log s + rho - E = rho - KL). The positive moves all h
alike and cancels, so similarities will do. The divergence falls as tau rises, its derivative by log tau is minus the
variance of h / tau under q, and Newton's steps are taken on its logarithm, which is nearly straight.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from ..pipeline.cores import cores
from ..storage.arrays import Float32s, Float64s, Int32s, Int64s
from ..storage.kernels import kernel

SOLVED_AT_ONCE = 1024
"""Samples compared with all others at once: 16 MB of similarities."""
_LAST_STEP = 1e-2
"""Of log tau: what the step after it would be is its square."""
_LOG2_E, _LN_2 = np.float32(1 / math.log(2)), math.log(2)
_LEAST = np.float32(-120)
"""Lowest exponent of 2: smaller weights add nothing, and subnormal numbers take a hundred times as long."""
_C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in (0.69314720, 0.24022120, 0.05550713, 0.00967554, 0.00132765))
"""2^f = 1 + C1 f + C2 f² + … within 2e-7 for |f| <= 0.5."""
_ONE, _HALF, _BIAS, _MANTISSA = np.float32(1), np.float32(0.5), np.int32(127), np.int32(23)

_VISITS = 200
_FIRST, _HALVED_AFTER, _LARGEST = 0.3, 20, 0.1
"""Step of log tau by a gradient of 1 in the first visit, visits after which it has halved, and the largest step, since
after a larger one s is another temperature's. The rule's own eta would take many epochs, to the same place."""


class Bounds(NamedTuple):
    """Where a temperature is looked for."""

    rho: float
    lowest: float
    highest: float


class Solved(NamedTuple):
    """Solved temperatures of m samples of one side, float32 [m] each."""

    tau: Float32s
    """0 where no temperature from `lowest` on is low enough: more negatives than rho allows are as near as the
    nearest. Infinite where none up to `highest` is high enough."""
    divergence: Float32s
    """That of the weights at the temperature given for comparison; NaN where none was."""


def solve(
    anchors: Sequence[Float32s],
    others: Sequence[Float32s],
    own: Int64s,
    bounds: Bounds,
    *,
    population: int,
    tau: Float32s | None = None,
) -> Solved:
    """Solve the temperatures of m samples against k others, drawn from a population.

    anchors: the samples' features, float32 [m, d], rows of norm 1, one array a view; the weights of all views are one
    softmax. others: those of the others, float32 [k, d], one array a view: of pairs the other side's. own: int64 [m],
    the place of each sample among the others, -1 where it is not there; it is left out. tau: float32 [m], temperatures
    at which to measure the divergence.

    Of drawn others, sums of weights are noisy and so the divergence is too low: by 1/k its expansion at second order,
    which is subtracted. docs/figures_inspect.md has what is left.
    """
    m, columns = len(own), np.concatenate(others).T.copy()
    k = columns.shape[1] // len(others)
    found = Solved(np.empty(m, np.float32), np.full(m, np.nan, np.float32))
    at = np.full(m, np.nan, np.float32) if tau is None else tau
    threads = cores()
    similarity = np.empty((min(m, SOLVED_AT_ONCE), len(anchors), columns.shape[1]), np.float32)
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, m, SOLVED_AT_ONCE):
            stop = min(first + SOLVED_AT_ONCE, m)
            block, mine = similarity[: stop - first], own[first:stop]
            for view, features in enumerate(anchors):
                np.matmul(features[first:stop], columns, out=block[:, view])
            inside = np.flatnonzero(mine >= 0)
            for view in range(len(others)):
                block[inside, :, mine[inside] + view * k] = -np.inf
            drawn = 1 - k / population
            edges = np.linspace(0, stop - first, threads + 1).astype(int)
            parts = list(map(slice, edges[:-1], edges[1:]))
            each = lambda part: _solve_rows(  # noqa: E731
                block[part].reshape(-1, block[0].size), *bounds, drawn,  # noqa: B023
                at[first:stop][part], found.tau[first:stop][part], found.divergence[first:stop][part],  # noqa: B023
            )  # fmt: skip
            list(pool.map(each, parts))
    return found


@kernel()
def _moments(h: Float32s, tau: float, whole: Int32s, part: Float32s) -> tuple[float, float]:
    """Return the divergence and the variance of h / tau.

    h: float32 [k]; -inf is left out. whole, part: memory for k numbers. exp is written out because LLVM
    makes vectors of it: 0.7 ns a negative, where torch's passes over the same numbers take 15.
    """
    highest, scale, count = h.max(), np.float32(_LOG2_E / tau), 0
    for j in range(len(h)):
        count += h[j] > _LEAST
        y = max((h[j] - highest) * scale, _LEAST)
        nearest = np.floor(y + _HALF)
        f = y - nearest
        part[j] = ((((_C5 * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _ONE
        whole[j] = (np.int32(nearest) + _BIAS) << _MANTISSA
    power, zero = whole.view(np.float32), np.float32(0)
    e_sum, ey_sum, eyy_sum = zero, zero, zero
    for j in range(len(h)):
        y = max((h[j] - highest) * scale, _LEAST)
        e = part[j] * power[j]
        e_sum, ey_sum, eyy_sum = e_sum + e, ey_sum + e * y, eyy_sum + e * y * y
    total = np.float64(e_sum)
    mean = _LN_2 * ey_sum / total
    return mean - math.log(total / count), _LN_2**2 * eyy_sum / total - mean**2


@kernel()
def _solve_rows(
    similarity: Float32s, rho: float, lowest: float, highest: float,
    drawn: float, at: Float32s, tau: Float32s, divergence: Float32s,
) -> None:  # fmt: skip
    """Fill tau and divergence, [m], of rows of similarities, [m, k]; at: temperatures to measure the divergence at."""
    k = similarity.shape[1]
    whole, part = np.empty(k, np.int32), np.empty(k, np.float32)
    for row in range(len(similarity)):
        h = similarity[row]
        first, second = h[: k // 2], h[k // 2 :]
        middle = math.sqrt(lowest * highest)
        solved = _solved(h, rho, lowest, highest, middle, whole, part)
        if drawn > 0 and 0 < solved < np.inf:
            one = _solved(first, rho, lowest, highest, solved, whole[: k // 2], part[: k // 2])
            other = _solved(second, rho, lowest, highest, solved, whole[k // 2 :], part[k // 2 :])
            if one > 0 and other > 0 and one < np.inf and other < np.inf:
                solved *= (solved / math.sqrt(one * other)) ** drawn
        tau[row] = solved
        if at[row] > 0:
            divergence[row] = _moments(h, at[row], whole, part)[0]


@kernel()
def _solved(
    h: Float32s, rho: float, lowest: float, highest: float, start: float,
    whole: Int32s, part: Float32s,
) -> float:  # fmt: skip
    """Return the temperature of one sample: by Newton's steps, and halves of the bracket where they leave it."""
    ends = math.log(lowest), math.log(highest)
    low, high = ends
    at, low_tried, high_tried = math.log(start), False, False
    for _ in range(60):
        found, variance = _moments(h, math.exp(at), whole, part)
        if found > rho:
            if at == ends[1]:
                return np.inf
            low, low_tried = at, True
        else:
            if at == ends[0]:
                return 0.0
            high, high_tried = at, True
        step = high - low if found > rho else low - high
        if variance > 0 and found > 0 and rho > 0:
            step = found / variance * math.log(found / rho)
        new = at + step
        if new >= high:
            new = (at + high) / 2 if high_tried else high
        elif new <= low:
            new = (at + low) / 2 if low_tried else low
        if abs(new - at) < _LAST_STEP:
            return math.exp(new)
        at = new
    return math.exp(at)


def at_rest(h: Float32s, tau: Float32s, bounds: Bounds, gamma: float, clip: float, negatives: int) -> Float64s:
    """Return where the update rule (iSogCLR eq 11 to 13) takes m temperatures while features stay, float64 [m].

    h: float32 [m, k], similarities of k negatives minus that of the positive. tau: float32 [m], to begin with.
    gamma, clip: of the rule. negatives: in a batch.
    """
    random, rows = np.random.default_rng(0), np.arange(len(h))[:, None]
    log_tau, log_s = np.log(tau.astype(np.float64)), np.zeros(len(h))
    total, counted = np.zeros(len(h)), 0
    for visit in range(_VISITS):
        drawn = random.integers(0, h.shape[1], (1, min(negatives, 1024)))
        exponent = h[rows, drawn] / np.exp(log_tau)[:, None]
        highest = exponent.max(1)
        weights = np.exp(exponent - highest[:, None])
        log_g = np.log(weights.mean(1)) + highest
        keep = math.log1p(-gamma) if gamma < 1 else -math.inf
        log_s = np.logaddexp(keep + log_s, math.log(gamma) + log_g) if visit else log_g
        mean_exponent = np.exp(log_g - log_s) * (weights * exponent).sum(1) / weights.sum(1)
        gradient = (log_s + bounds.rho - mean_exponent).clip(-clip, clip)
        step = (_FIRST / (1 + visit / _HALVED_AFTER) * gradient).clip(-_LARGEST, _LARGEST)
        log_tau = (log_tau - step).clip(np.log(bounds.lowest), np.log(bounds.highest))
        if visit >= _VISITS // 2:
            total, counted = total + log_tau, counted + 1
    return np.exp(total / counted)
