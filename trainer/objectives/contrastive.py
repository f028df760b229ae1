"""The step shared by all softmax-like objectives; each derives value and gradient weights from its anchors' sums."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .base import WEIGHT, Computed, Objective, Progress, Settings
from .directed import Directed
from .doubt import DoubtSettings, is_doubted, with_mean_of_one
from .gathering import GlobalBatch
from .pairs import Pairs
from .softmax_sums import LN2, Sums, Weights, accumulate, grad_weights, row_weights

Rows = dict[str, Tensor]
"""Per-sample state of a batch by field: [sides, b], in the dtype of the computation; `visits` is [1, b]."""


class Anchors(NamedTuple):
    """Sums over the candidates of each anchor in the global batch, [2, b]: anchors in `first`, then those in `second`.

    With keys or local views: [directions, b], as in `Directed`.

    h_ij = S_ij - S_ii; q is the softmax of an anchor's h_ij / tau_i over its candidates j, which exclude the positive.
    """

    tau: Tensor
    log_sum: Tensor
    """log sum_j exp(h_ij / tau_i)."""
    mean_exponent: Tensor
    """sum_j q_ij · h_ij / tau_i."""
    positive: Tensor
    """S_ii."""
    margin: Tensor
    """S_ii - max_j S_ij."""
    candidates: int
    """Candidates per anchor."""
    weight: Tensor | None
    """Factors of the samples' terms, [b]; None: all are 1."""
    doubted: Tensor | None
    """Whether doubt has set a sample's factor to 0, bool [b]; None without `doubt_after`."""

    def weighted(self, values: Tensor) -> Tensor:
        """Return values of anchors or of sides, [k, b], times their samples' factors: the terms of a mean."""
        return values if self.weight is None else values * self.weight


@dataclass
class Step:
    """An objective's results from the anchors of a batch."""

    value: Tensor
    """Scalar: the reported loss."""
    negative_weight: Tensor
    """As anchors: the gradient on an anchor's candidates is dR/dS_ij = negative_weight_i · q_ij."""
    positive_weight: Tensor | None = None
    """As anchors: the gradient on its positive is dR/dS_ii = -positive_weight_i; None: negative_weight."""
    rows: Rows = field(default_factory=dict)
    """New state."""
    parameter_gradients: list[Tensor] = field(default_factory=list)
    """In the order of `parameters()`."""
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Contrastive(Objective):
    """An objective whose gradient weights an anchor's candidates by their softmax, against its positive.

    Bimodal: an anchor's candidates are the other samples' features of the other side; each side has its own state.
    Unimodal: the candidates are both views of every other sample; both anchors share the sample's row of state.

    With keys, the candidates are the other samples' keys of the target; both anchors still share the sample's row.

    With several ranks, one exchange gathers the features or keys and a second the anchors' sums and states, a few
    scalars per sample. Each rank then computes the same step, keeps its own samples' new state and forms its own
    features' gradients, times the number of ranks, so that DDP's mean over ranks is the gradient on the global batch.
    FastCLIP section 4.
    """

    takes_weights = True

    doubt_keeps_mean: ClassVar[bool] = False
    """Whether other samples' factors rise when samples are doubted, so that the mean stays 1."""

    reads_visits: ClassVar[bool] = False
    """Whether `rows` also holds `visits`, the counts before the step."""

    def __init__(self, mode: str, settings: Settings, **initial: float) -> None:
        """initial: as in Objective. With `doubt_after`, log g is kept if there is no log s.

        Raises ValueError if `doubt_after` is set and the objective takes no weights, or the mode is unimodal.
        """
        self.doubt_after = settings.doubt_after if isinstance(settings, DoubtSettings) else None
        if self.doubt_after is not None and "log_s" not in initial:
            initial["log_g"] = -math.inf
        super().__init__(mode, settings, **initial)
        if self.doubt_after is not None:
            if not self.across:
                raise ValueError(
                    f"{self._name}: doubt_after is for pairs, mode bimodal; two views of a picture always "
                    "belong together"
                )
            self.check_weights()

    @abstractmethod
    def temperature(self, rows: Rows, like: Tensor) -> Tensor:
        """Return this step's temperatures, [sides, n] or a scalar, in the dtype and on the device of `like`."""

    @abstractmethod
    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        """Return value, gradient weights, new state and metrics of a step, from the global batch's old state `rows`.

        `share` includes the samples' weights; `anchors.weighted` applies them to the terms of the value and of the
        parameters' gradients. They do not affect state and metrics.
        """

    def further_sums(self, pairs: Pairs) -> Rows:
        """Return values of this rank's samples, [k, n] each; `compute_step` receives the global batch's, in `rows`."""
        return {}

    def pool(self, of_anchors: Tensor) -> Tensor:
        """Average over the anchors that share a row of state: [2, b] -> [sides, b]."""
        return of_anchors if len(self.sides) == 2 else of_anchors.mean(0, keepdim=True)

    def pool_log(self, of_anchors: Tensor) -> Tensor:
        """As `pool`, for values given as logarithms."""
        return of_anchors if len(self.sides) == 2 else of_anchors.logsumexp(0, keepdim=True) - math.log(2)

    def share(self, anchors: Anchors) -> float | Tensor:
        """Return the weight of one anchor that turns a sum over anchors into a mean over samples, summed over sides.

        With sample weights, [b]: each times its factor.
        """
        share = len(self.sides) / anchors.tau.numel()
        return share if anchors.weight is None else share * anchors.weight

    def candidates(self, batch_size: int) -> int:
        return (batch_size - 1) * (1 if self.across else 2)

    def compute(self, pairs: Pairs, batch: GlobalBatch, state: Mapping[str, Tensor], progress: Progress) -> Computed:
        features, own = pairs.features, pairs.own
        rows = {
            name: torch.stack([state[f"{side}/{name}"] for side in self.sides]).to(features.dtype)
            for name in self.row_fields
        }
        if self.reads_visits:
            rows["visits"] = state["visits"].to(features.dtype)[None]
        if WEIGHT in state:
            rows[WEIGHT] = state[WEIGHT].to(features.dtype)[None]
        further = self.further_sums(pairs)
        sums = accumulate(pairs, self.temperature(rows, features).expand(pairs.anchor_sets, own.stop - own.start))
        positive, sums, rows = _gather(pairs, batch, sums, rows | further)
        tau = self.temperature(rows, features)
        weight, doubted, of_doubt = self._weights(rows, progress)
        anchors = _anchors(pairs, positive, tau, sums, weight, doubted)
        step = self.compute_step(anchors, rows, progress)
        found = self.pool((anchors.margin > 0).to(features.dtype)).mean(1)
        return Computed(
            value=step.value,
            feature_gradients=lambda: _feature_gradients(pairs, tau, sums, step).mul_(batch.world),
            parameter_gradients=step.parameter_gradients,
            state={
                f"{side}/{name}": values[number, own].to(state[f"{side}/{name}"].dtype)
                for name, values in step.rows.items()
                for number, side in enumerate(self.sides)
            },
            metrics=step.metrics | self.by_side(retrieval_accuracy=found) | of_doubt,
        )

    def _weights(self, rows: Rows, progress: Progress) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
        """Take the samples' weights, [1, b], from `rows`; return them with doubted pairs' set to 0.

        Also returns which pairs are doubted, bool [b], and metrics of the doubt.
        """
        weight = rows.pop(WEIGHT, None)
        if self.doubt_after is None:
            return weight, None, {}
        log_s = rows["log_s" if "log_s" in rows else "log_g"]
        doubted = is_doubted(log_s) & (progress.epoch >= self.doubt_after)
        factors = (~doubted).to(log_s.dtype)
        outweighed = (log_s > 0).to(log_s.dtype).mean(1)
        metrics = {"share_doubted": 1 - factors.mean()} | self.by_side(share_outweighed=outweighed)
        if self.doubt_keeps_mean:
            factors = with_mean_of_one(factors)
        return factors[None] if weight is None else weight * factors, doubted, metrics


def _anchors(
    pairs: Pairs, positive: Tensor, tau: Tensor, sums: Sums, weight: Tensor | None, doubted: Tensor | None
) -> Anchors:
    peak, total, spread = (pairs.of_directions(values) for values in sums)
    tau, positive = tau.expand_as(peak), positive.expand_as(peak)
    lift = (peak - positive) / tau
    return Anchors(
        tau=tau,
        log_sum=total.log() + lift,
        mean_exponent=spread / total + lift,
        positive=positive,
        margin=positive - peak,
        candidates=pairs.negatives,
        weight=None if weight is None else weight[0],
        doubted=doubted,
    )


def _gather(pairs: Pairs, batch: GlobalBatch, sums: Sums, rows: Rows) -> tuple[Tensor, Sums, Rows]:
    """Return the similarities of all positives, and the global batch's sums and rows from this rank's."""
    positive, whole = pairs.exchange(batch, [*sums, *rows.values()])
    return positive, Sums(*whole[: len(sums)]), dict(zip(rows, whole[len(sums) :], strict=True))


def _feature_gradients(pairs: Pairs, tau: Tensor, sums: Sums, step: Step) -> Tensor:
    """Return the gradients of this rank's features, [2, n, d] or [views, n, d]."""
    on_positives = step.negative_weight if step.positive_weight is None else step.positive_weight
    tau_ln2 = tau.expand_as(sums.peak) * LN2
    if isinstance(pairs, Directed):
        scale = pairs.summed_by_block(step.negative_weight) / sums.total
        own = Weights(*(values[:, pairs.own].flatten() for values in (sums.peak, tau_ln2, scale)))
        return pairs.gradients(
            lambda similarities, rows, block: row_weights(similarities, rows, own), in_positives=-on_positives
        )
    weights = Weights(sums.peak.flatten(), tau_ln2.flatten(), (step.negative_weight / sums.total).flatten())
    return pairs.gradients(
        lambda similarities, rows, block: grad_weights(similarities, rows, block, weights),
        in_positives=-on_positives.sum(0),
    )
