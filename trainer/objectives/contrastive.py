"""The sums that contrastive losses are made of, differentiable, and the base of all losses of softmax sums."""

import math
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from .base import WEIGHT, Objective, Outcome, Progress, Settings, State
from .gathering import Frame, GlobalBatch
from .pairs import EXCLUDED, Block, Pairs

LN2 = math.log(2)
LEAST_MEAN = 0.1
"""Lower bound of the mean by which doubt's factors are divided, so that a few remaining samples get no huge steps."""

Rows = dict[str, Tensor]
"""Per-sample state of a batch by field: [sides, b], in the dtype of the computation; `visits` is [1, b]."""


class Sums(NamedTuple):
    """Running sums over the candidates processed so far, in exponents x_ij = (S_ij - peak_i) / tau_i; each [sets, n].

    Relative to the anchor's largest similarity nothing overflows at any temperature. The positive is never among the
    candidates here; a loss that includes it adds its exponent, which is 0.
    """

    peak: Tensor
    """Largest similarity."""
    total: Tensor
    """Sum of exp(x)."""
    spread: Tensor
    """Sum of x·exp(x)."""


def accumulate(pairs: Pairs, tau: Tensor) -> Sums:
    """Return the sums over candidates of this rank's anchors; tau and results are [sets, n], float32 or 64.

    Powers are of 2: on a CPU torch computes exp2 five times as fast as exp, and dividing by tau · ln 2 costs nothing.
    """
    # Allocate before the pieces: small results between freed temporaries would fragment the heap, by gigabytes.
    sums = Sums(torch.full_like(tau, EXCLUDED), torch.zeros_like(tau), torch.zeros_like(tau))
    tau_ln2, add = tau * LN2, pairs.fused(_add)
    for half, block in enumerate(pairs.blocks):
        for rows, similarities in pairs.pieces(block):
            anchors = half, block.local(rows)
            add(similarities, tau_ln2[anchors], *(values[anchors] for values in sums), dim=1)
            if pairs.mirrored:
                add(similarities, tau_ln2[1], *(values[1] for values in sums), dim=0)
    sums.spread.mul_(LN2)
    return sums


def _add(similarities: Tensor, tau_ln2: Tensor, peak: Tensor, total: Tensor, spread: Tensor, dim: int) -> None:
    """Add the candidates along `dim` of a piece to the anchors' sums, in place; the spread is in powers of 2."""
    new_peak = torch.maximum(peak, similarities.amax(dim))
    exponents = (similarities - new_peak.unsqueeze(dim)).div_(tau_ln2.unsqueeze(dim))
    exps = exponents.exp2()
    # Rescale the old sums to the new peak, which is at least as high.
    lower = (peak - new_peak).div_(tau_ln2)
    share = lower.exp2()
    spread.addcmul_(lower, total).mul_(share).add_(exponents.mul_(exps).sum(dim))
    total.mul_(share).add_(exps.sum(dim))
    peak.copy_(new_peak)


class AnchorSums(torch.autograd.Function):
    """log sum_j exp(h_ij / tau_i) and the positives of the global batch's anchors; differentiable in views and tau.

    The gradient of the views is this rank's, times the number of ranks, because DDP averages over them, and all ranks
    compute the same loss. So other ranks' features get theirs without an exchange. FastCLIP section 4.
    """

    @staticmethod
    def forward(
        ctx: Any, views: Tensor, tau: Tensor, pairs: Pairs, world: int, positive: Tensor, sums: Sums
    ) -> tuple[Tensor, Tensor, Tensor]:
        """views: [v, n, d], of this rank; tau and the rest: [directions, b], the sums [sets, b] of the whole batch."""
        peak, total, spread = (pairs.of_directions(values) for values in sums)
        lift = (peak - positive) / tau
        mean_exponent = spread / total + lift
        ctx.pairs, ctx.world, ctx.sums = pairs, world, sums
        ctx.save_for_backward(tau, mean_exponent)
        ctx.mark_non_differentiable(mean_exponent)
        return total.log() + lift, positive.clone(), mean_exponent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, in_log_sum: Tensor, in_positive: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """d log_sum_i = sum_j q_ij (dS_ij - dS_ii) / tau_i - mean_exponent_i dtau_i / tau_i; q: softmax of h / tau."""
        tau, mean_exponent = ctx.saved_tensors
        weight = in_log_sum / tau
        of_views = None
        if ctx.needs_input_grad[0]:
            of_views = _of_views(ctx.pairs, ctx.sums, tau, weight, in_positive - weight).mul_(ctx.world)
        return of_views, -weight * mean_exponent, None, None, None, None


def _of_views(pairs: Pairs, sums: Sums, tau: Tensor, weight: Tensor, in_positives: Tensor) -> Tensor:
    """Return the views' gradients, if dR/dS_ij = weight_i q_ij, summed over a pair's anchors, one or two."""
    tau_of_sets = tau[: pairs.sets]  # a sample's anchors share its tau, except in mode bimodal, which has two sets
    per_set = (sums.peak, tau_of_sets * LN2, pairs.of_sets(weight) / sums.total)
    vectors, weigh_piece = [pairs.of_rows(values) for values in per_set], pairs.fused(_weigh)

    def weigh(similarities: Tensor, rows: slice, block: Block) -> None:
        of_columns = [vector[block.columns] for vector in vectors] if pairs.mutual else []
        weigh_piece(similarities, [vector[rows].unsqueeze(1) for vector in vectors], of_columns)

    return pairs.gradients(weigh, in_positives)


def _weigh(similarities: Tensor, of_rows: list[Tensor], of_columns: list[Tensor]) -> None:
    """Overwrite a piece with its weights; peak, tau · ln 2 and scale of the rows, and of the columns if they weigh."""
    weights_of_columns = None
    if of_columns:
        peak, tau_ln2, scale = of_columns
        weights_of_columns = (similarities - peak).div_(tau_ln2).exp2_().mul_(scale)
    peak, tau_ln2, scale = of_rows
    similarities.sub_(peak).div_(tau_ln2).exp2_().mul_(scale)
    if weights_of_columns is not None:
        similarities.add_(weights_of_columns)


class PowerSums(torch.autograd.Function):
    """The positives of the anchors, and means over anchors of sum_j S_ij and sum_j S_ij²; differentiable in the views.

    For losses that are quadratic in the similarities, whose anchors across views are those of the first. The gradient
    is this rank's times the ranks, as AnchorSums'.
    """

    @staticmethod
    def forward(ctx: Any, views: Tensor, pairs: Pairs, ranks: GlobalBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """views: [v, n, d]; returns positives [k, b], the two means, and the largest similarities [k, b]."""
        own = views.new_empty((3, len(pairs.once), views.shape[1]))
        for number, block in enumerate(pairs.once):
            for rows, similarities in pairs.pieces(block):
                pairs.fill_own(similarities, rows, block, 0.0)
                total, norm = similarities.sum(1), torch.linalg.vector_norm(similarities, dim=1)
                pairs.fill_own(similarities, rows, block, EXCLUDED)
                own[:, number, block.local(rows)] = torch.stack([total, norm.square(), similarities.amax(1)])
        positive, (sums,) = pairs.exchange(ranks, [own.flatten(0, 1)])
        total, squares, peak = sums.chunk(3)
        ctx.pairs, ctx.world, ctx.anchors = pairs, ranks.world, peak.numel()
        ctx.mark_non_differentiable(peak)
        return positive[: len(peak)].clone(), total.mean(), squares.mean(), peak

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, in_positive: Tensor, in_total: Tensor, in_squares: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        pairs: Pairs = ctx.pairs
        # Within all views, both rows of a pair are anchors.
        share = (2 if pairs.mutual and len(pairs.once) == 2 else 1) / ctx.anchors

        def weigh(similarities: Tensor, rows: slice, block: Block) -> None:
            similarities.mul_(2 * share * in_squares).add_(share * in_total)
            pairs.fill_own(similarities, rows, block, 0.0)

        return pairs.gradients(weigh, in_positive).mul_(ctx.world), None, None


class DoubtSettings(Settings, frozen=True):
    doubt_after: int | None = Field(default=None, ge=1)
    """Epochs, 1 or more, after which a pair's terms of the loss do not count while its log s, summed over both sides,
    is above 0. Its temperature then stays, and its log s is still updated, so the pair may return. Unset: never. Mode
    bimodal. Ours."""


class Anchors(NamedTuple):
    """Sums over the candidates of each anchor in the global batch, [2, b]: anchors in `first`, then those in `second`.

    With keys or local views: [directions, b], as in `Directed`.

    h_ij = S_ij - S_ii; q is the softmax of an anchor's h_ij / tau_i over its candidates j, which exclude the positive.
    """

    tau: Tensor
    """Differentiable, if `temperature` is."""
    log_sum: Tensor
    """log sum_j exp(h_ij / tau_i). Differentiable in the features and tau."""
    mean_exponent: Tensor
    """sum_j q_ij · h_ij / tau_i."""
    positive: Tensor
    """S_ii. Differentiable."""
    margin: Tensor
    """S_ii - max_j S_ij."""
    candidates: int
    """Candidates per anchor."""
    features: Tensor
    """[2, b, d], of the global batch; differentiable, or the momentum encoder's keys."""
    sides: int
    """2 in mode bimodal, in which an anchor has its own row of state and term of the loss; 1 in mode unimodal."""
    weight: Tensor | None
    """Factors of the samples' terms, [b]; None: all are 1."""
    doubted: Tensor | None
    """Whether doubt has set a sample's factor to 0, bool [b]; None without `doubt_after`."""

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over samples of values [k, b] of anchors or sides, times their factors, summed over sides."""
        return self.sides * (values if self.weight is None else values * self.weight).mean()


class Contrastive(Objective):
    """An objective whose gradient weights an anchor's candidates by their softmax, against its positive.

    Bimodal: an anchor's candidates are the other samples' features of the other side; each side has its own state.
    Unimodal: the candidates are both views of every other sample; both anchors share the sample's row of state.

    With keys, the candidates are the other samples' keys of the target; both anchors still share the sample's row.

    With several ranks, one exchange gathers the features or keys and a second the anchors' sums and states, a few
    scalars per sample. Each rank then computes the same loss, and the new state and gradients of its own samples.
    """

    takes_weights = True
    is_whole = True

    doubt_keeps_mean: ClassVar[bool] = False
    """Whether other samples' factors rise when samples are doubted, so that the mean stays 1."""

    reads_visits: ClassVar[bool] = False
    """Whether `rows` also holds `visits`, the counts before the step."""

    def __init__(self, mode: str, settings: Settings, **initial: float) -> None:
        """initial: as in Objective. With `doubt_after`, log g is kept if there is no log s.

        Raises ValueError if `doubt_after` is set and the mode is unimodal.
        """
        self.doubt_after = settings.doubt_after if isinstance(settings, DoubtSettings) else None
        if self.doubt_after is not None and "log_s" not in initial:
            initial["log_g"] = -math.inf
        super().__init__(mode, settings, **initial)
        if self.doubt_after is not None and not self.across:
            raise ValueError("doubt_after is for pairs, mode bimodal; two views of a picture always belong together")

    @abstractmethod
    def temperature(self, rows: Rows, features: Tensor) -> Tensor:
        """Return the temperatures of some samples, [sides, n] or a scalar, in the dtype and on the device of features.

        rows: their state before the step; features: theirs, [2, n, d], without a graph. Called twice, for this rank's
        samples and for the global batch's, and differentiated the second time.
        """

    @abstractmethod
    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        """Return the loss of the global batch, its new state as `rows`, and metrics, from its old state `rows`.

        `anchors.mean` applies the samples' weights, which do not affect state and metrics.
        """

    def further_sums(self, pairs: Pairs) -> Rows:
        """Return values of this rank's samples, [k, n] each; `loss` receives the global batch's, in `rows`."""
        return {}

    def pool(self, of_anchors: Tensor) -> Tensor:
        """Average over the anchors that share a row of state: [k, b] -> [sides, b]."""
        return of_anchors if len(self.sides) == 2 else of_anchors.mean(0, keepdim=True)

    def pool_log(self, of_anchors: Tensor) -> Tensor:
        """As `pool`, for values given as logarithms."""
        return of_anchors if len(self.sides) == 2 else of_anchors.logsumexp(0, keepdim=True) - math.log(len(of_anchors))

    def step(self, frame: Frame, state: State, progress: Progress) -> Outcome:
        targets, own, pairs = frame.targets, frame.own, self.compared(frame)
        with torch.no_grad():
            rows = {
                name: torch.stack([state[f"{side}/{name}"] for side in self.sides]).to(targets.dtype)
                for name in self.row_fields
            }
            extra = {"visits": self.reads_visits, WEIGHT: WEIGHT in state}
            rows |= {name: state[name].to(targets.dtype)[None] for name, is_there in extra.items() if is_there}
            tau = self.temperature(rows, targets[:, own]).expand(pairs.sets, own.stop - own.start)
            rows |= self.further_sums(pairs)
            sums = accumulate(pairs, tau)
            positive, whole = pairs.exchange(frame.ranks, [*sums, *rows.values()])
            sums, rows = Sums(*whole[: len(sums)]), dict(zip(rows, whole[len(sums) :], strict=True))
            weight, doubted, of_doubt = self._weights(rows, progress)
        tau = self.temperature(rows, targets).expand_as(positive)
        arguments = (frame.views, tau, pairs, frame.ranks.world, positive, sums)
        log_sum, differentiable_positive, mean_exponent = AnchorSums.apply(*arguments)  # type: ignore[no-untyped-call]
        margin = positive - pairs.of_directions(sums.peak)
        anchors = Anchors(
            tau=tau,
            log_sum=log_sum,
            mean_exponent=mean_exponent,
            positive=differentiable_positive,
            margin=margin,
            candidates=pairs.negatives,
            features=frame.features(),
            sides=len(self.sides),
            weight=None if weight is None else weight[0],
            doubted=doubted,
        )
        outcome = self.loss(anchors, rows, progress)
        new = {
            f"{side}/{name}": values[number, own].to(state[f"{side}/{name}"].dtype)
            for name, values in outcome.state.items()
            for number, side in enumerate(self.sides)
        }
        return Outcome(outcome.loss, new, outcome.metrics | self.retrieval(margin) | of_doubt)

    def _weights(self, rows: Rows, progress: Progress) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
        """Take the samples' weights, [1, b], from `rows`; return them with doubted pairs' set to 0.

        Also returns which pairs are doubted, bool [b], and metrics of the doubt.
        """
        weight = rows.pop(WEIGHT, None)
        if self.doubt_after is None:
            return weight, None, {}
        log_s = rows["log_s" if "log_s" in rows else "log_g"]
        # A model learns right pairs long before it learns wrong pairs by heart. Until then a wrong pair's positive is
        # random, and the mean of its negatives' exp(h / tau) is above 1 more often than not; -inf: an unseen pair.
        doubted = (log_s.sum(0) > 0) & (progress.epoch >= self.doubt_after)
        factors = (~doubted).to(log_s.dtype)
        outweighed = (log_s > 0).to(log_s.dtype).mean(1)
        metrics = {"share_doubted": 1 - factors.mean()} | self.by_side(share_outweighed=outweighed)
        if self.doubt_keeps_mean:  # otherwise a learned temperature would follow fewer samples
            factors = factors / factors.mean().clamp(min=LEAST_MEAN)
        return factors[None] if weight is None else weight * factors, doubted, metrics
