"""Mini-batch losses of image-text pairs with a logit scale: CLIP, CyCLIP and SigLIP."""

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from .base import Objective, Outcome, Progress, Settings, State, scalar_parameter
from .contrastive import Anchors, Contrastive, DoubtSettings, Rows
from .gathering import Frame, GlobalBatch
from .pairs import EXCLUDED, Block, Pairs
from .sogclr import log_g_rows

LOG_LOGIT_SCALE_MAX = math.log(100.0)


class LogitScaleSettings(Settings, frozen=True):
    log_logit_scale: float = Field(default=math.log(1 / 0.07), ge=0.0, le=LOG_LOGIT_SCALE_MAX)
    """Initial log of the logit scale (1/tau), in [0, ln 100]. Source: CLIP (Radford et al., 2021)."""
    learn_scale: bool = True
    """Whether the logit scale is learned; False keeps it, as in iSogCLR's figure 7."""


class ClipSettings(LogitScaleSettings, DoubtSettings, frozen=True):
    """Settings of CLIP."""


class CyclipSettings(LogitScaleSettings, frozen=True):
    in_modal: float = Field(default=0.25, ge=0.0)
    """Weight of (1/b) sum_ij (x_i·x_j - t_i·t_j)², 0 or more. CyCLIP eq 4; 0.25 in the authors' command."""
    cross_modal: float = Field(default=0.25, ge=0.0)
    """Weight of (1/b) sum_ij (x_i·t_j - x_j·t_i)², 0 or more. CyCLIP eq 3; 0.25 in the authors' command."""


class Clip(Contrastive):
    """Mini-batch loss of image-text pairs: the cross-entropy of S · logit_scale, averaged over both sides.

    The parameter `log_logit_scale` is clamped to [0, ln 100]. There is no per-sample state, so `state` may be empty;
    `visits` is updated if given. With `doubt_after`: log_g of each side.
    """

    settings_of_mode: ClassVar = {"bimodal": ClipSettings}
    doubt_keeps_mean = True

    settings: ClipSettings | CyclipSettings

    def __init__(self, mode: str, settings: ClipSettings | CyclipSettings) -> None:
        super().__init__(mode, settings)
        self.log_logit_scale = scalar_parameter(settings.log_logit_scale).requires_grad_(settings.learn_scale)

    def project(self) -> None:
        self.log_logit_scale.clamp_(0.0, LOG_LOGIT_SCALE_MAX)

    def temperature(self, rows: Rows, features: Tensor) -> Tensor:
        return self.log_logit_scale.neg().exp().to(features)

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        # The positive is a candidate too, with exponent 0.
        cross_entropy = anchors.mean(F.softplus(anchors.log_sum)) / 2
        return Outcome(cross_entropy, log_g_rows(anchors, rows), {"logit_scale": self.log_logit_scale.detach().exp()})


class Cyclip(Clip):
    """CLIP's loss, and consistency of similarities within and across the sides (CyCLIP, Goel et al., NeurIPS 2022).

    Neither term moves the logit scale. Both follow from products [d, d] of the features, so they need no matrix [b, b]:
    for X, T [b, d], |X Xᵀ - T Tᵀ|² = |XᵀX|² - 2 |XᵀT|² + |TᵀT|² and |X Tᵀ - T Xᵀ|² = 2 <XᵀX, TᵀT> - 2 <XᵀT, TᵀX>.
    """

    settings_of_mode: ClassVar = {"bimodal": CyclipSettings}
    takes_weights = False  # consistency concerns pairs of samples
    settings: CyclipSettings

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        outcome, (x, t) = super().loss(anchors, rows, progress), anchors.features
        xx, xt, tt = x.T @ x, x.T @ t, t.T @ t
        in_modal = (xx.square() - 2 * xt.square() + tt.square()).sum()
        cross_modal = 2 * (xx * tt - xt * xt.T).sum()
        consistency = self.settings.in_modal * in_modal + self.settings.cross_modal * cross_modal
        return replace(outcome, loss=outcome.loss + consistency / len(x))


class SiglipSettings(LogitScaleSettings, frozen=True):
    """Settings of SigLIP."""

    log_logit_scale: float = Field(default=math.log(10.0), ge=-10.0, le=10.0)
    """Initial log of the logit scale, in [-10, 10]. SigLIP algorithm 1."""
    logit_bias: float = Field(default=-10.0, ge=-100.0, le=100.0)
    """Initial value of the learned bias, in [-100, 100]: at first, few pairs count as positive. Algorithm 1."""


class Siglip(Objective):
    """SigLIP: every pair of a batch is a question of its own, answered by a sigmoid (Zhai et al., ICCV 2023).

    Value: -(1/b) sum over all i, j of log sigmoid(z_ij · (S_ij · exp(log_logit_scale) + logit_bias)), z_ij = 1 where
    i = j, otherwise -1. SigLIP algorithm 1. Neither parameter is clamped, as in the authors' code. No per-sample state.
    """

    settings_of_mode: ClassVar = {"bimodal": SiglipSettings}
    settings: SiglipSettings
    is_whole = True

    def __init__(self, mode: str, settings: SiglipSettings) -> None:
        super().__init__(mode, settings)
        self.log_logit_scale = scalar_parameter(settings.log_logit_scale).requires_grad_(settings.learn_scale)
        self.logit_bias = scalar_parameter(settings.logit_bias)

    def step(self, frame: Frame, state: State, progress: Progress) -> Outcome:
        pairs = self.compared(frame)
        scale, bias = self.log_logit_scale.exp().to(frame.views), self.logit_bias.clone().to(frame.views)
        arguments = (frame.views, scale, bias, pairs, frame.ranks)
        losses, margin = SigmoidSums.apply(*arguments)  # type: ignore[no-untyped-call]
        metrics = {"logit_scale": scale.clone(), "logit_bias": self.logit_bias.clone()}
        return Outcome(losses.mean(), {}, metrics | self.retrieval(margin))


class SigmoidSums(torch.autograd.Function):
    """Every image's sum of -log sigmoid(z_ij · (S_ij · scale + bias)) over all captions, [b].

    Differentiable in views, scale and bias; the views' gradient is this rank's times the ranks, as AnchorSums'.
    """

    @staticmethod
    def forward(
        ctx: Any, views: Tensor, scale: Tensor, bias: Tensor, pairs: Pairs, ranks: GlobalBatch
    ) -> tuple[Tensor, Tensor]:
        # Of negatives: losses, sums of w and of w · S, either side's largest S.
        own = views.new_zeros((5, views.shape[1]))
        peaks = own[3:].fill_(EXCLUDED)
        for half, block in enumerate(pairs.blocks):
            for rows, similarities in pairs.pieces(block):
                at = block.local(rows)
                peaks[half, at] = similarities.amax(1)
                if pairs.mirrored:
                    peaks[1] = torch.maximum(peaks[1], similarities.amax(0))
                if half == 0:
                    own[:3, at] = pairs.fused(_sums)(similarities, scale.detach(), bias.detach())
        losses, weights, moments, *peak = ranks.gather(own)
        wrong = -(pairs.positives * scale + bias)
        share = wrong.sigmoid()
        ctx.pairs, ctx.world = pairs, ranks.world
        ctx.save_for_backward(scale, bias, share, moments - share * pairs.positives, weights - share)
        margin = pairs.positives - torch.stack(peak)
        ctx.mark_non_differentiable(margin)
        return losses + F.softplus(wrong), margin

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, in_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (scale, bias, share, by_scale, by_bias), pairs = ctx.saved_tensors, ctx.pairs
        in_scale, in_bias = (in_losses * by_scale).sum(), (in_losses * by_bias).sum()
        if not ctx.needs_input_grad[0]:
            return None, in_scale, in_bias, None, None

        def weigh(similarities: Tensor, rows: slice, block: Block) -> None:
            of_images = in_losses[rows].unsqueeze(1) if block.rows.start < pairs.batch else in_losses[block.columns]
            similarities.mul_(scale).add_(bias).sigmoid_().mul_(scale * of_images)

        in_positives = (-scale * share * in_losses)[None]
        return pairs.gradients(weigh, in_positives).mul_(ctx.world), in_scale, in_bias, None, None


def _sums(similarities: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return the rows' sums of a piece's losses, of w, their slopes, and of w · S, [3, rows]."""
    logits = similarities * scale + bias  # so negative at the positives that they add nothing
    weights = logits.sigmoid()
    return torch.stack([F.softplus(logits).sum(1), weights.sum(1), weights.mul_(similarities).sum(1)])
