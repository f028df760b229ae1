"""DeCL: a contrastive loss whose normaliser is an auxiliary variable per sample (Chen et al., NeurIPS 2022).

Algorithm 1 with its loss_1 (eq 3) and loss_2, the several positives of eq 1, and the geometric loss of appendix E.
"""

import math
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from .base import Outcome, Progress
from .contrastive import Anchors, DoubtSettings, Rows, accumulate
from .distances import CosineOrDistance, SimilaritySettings
from .pairs import Pairs
from .sogclr import AverageSettings, log_g_rows, share_unseen, update_log_s


class DeclSettings(AverageSettings, SimilaritySettings, DoubtSettings, frozen=True):
    tau: float = Field(default=0.1, ge=1e-4, le=100.0)
    """Temperature, 0.0001 to 100."""
    auxiliary: Literal["sample", "mean"] = "sample"
    """The auxiliary variable U_i: a draw from its posterior Gamma(1, rate), or the posterior mean. DeCL algorithm 1;
    of the geometric loss, Gamma(2, rate)."""
    mixing: Literal["loss1", "loss2", "alternate", "decay", "geometric"] = "loss1"
    """Loss of a step: loss1 (as on ImageNet), loss2, both in turn (as with OpenCLIP), a mixture in which loss1 has
    the weight 1 / (1 + t / t0) (DeCL algorithm 1), or the geometric loss, loss2 + 2 loss1 (DeCL appendix E)."""
    t0: float = Field(default=1000.0, gt=0.0)
    """Steps until loss1 has half the weight, above 0; used only with mixing = "decay"."""
    rate: Literal["moving_average", "momentum"] = "moving_average"
    """Source of a sample's rate: a moving average over steps, or a momentum encoder, whose keys of the batch are then
    both anchors and negatives; without keys, momentum is refused. DeCL section 2.2.3."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the draws, which depend only on it and the step: 0 to 2³¹ - 1; used only with auxiliary = "sample"."""

    def weights(self, progress: Progress) -> tuple[float, float]:
        """Return the weights of loss1 and loss2 in this step."""
        match self.mixing:
            case "loss1":
                one = 1.0
            case "loss2":
                one = 0.0
            case "alternate":
                one = 1.0 - progress.step % 2
            case "decay":
                one = 1.0 / (1.0 + progress.step / self.t0)
            case "geometric":
                return 2.0, 1.0
        return one, 1 - one


class Decl(CosineOrDistance):
    """Contrastive loss with decoupled normalisers, bimodal or unimodal.

    With r_i the mean of exp(sim / tau) over an anchor's negatives and rate a moving average of it:
    loss1 = mean_i(U_i · r_i - positive / tau), U_i = e_i / rate_i not differentiated, e_i of Exp(1) or 1 (`auxiliary`);
    loss2 = mean_i(log sum of exp(sim / tau) over negatives - positive / tau). Bimodal: the sum of both sides. A local
    view is one anchor with two positives, both global views, and has the log of the mean of their exp(positive / tau).
    State: log_rate of each side; with rate = "momentum" the last batch's, which no step reads; with `doubt_after` also
    log_g.
    """

    settings_of_mode: ClassVar = {"bimodal": DeclSettings, "unimodal": DeclSettings}
    keys = "optional"
    has_local = True
    settings: DeclSettings

    def __init__(self, mode: str, settings: DeclSettings) -> None:
        super().__init__(mode, settings, log_rate=-math.inf)

    def check_frame(self, keys: bool, local: int) -> None:
        super().check_frame(keys, local)
        if self.settings.rate == "momentum" and not keys:
            raise ValueError("objective 'decl': rate = 'momentum' needs the keys of a momentum encoder")

    def temperature(self, rows: Rows, features: Tensor) -> Tensor:
        return torch.full_like(rows["log_rate"], self.settings.tau)

    def further_sums(self, pairs: Pairs) -> Rows:
        if self.settings.rate == "moving_average":
            return {}
        keys = Pairs(pairs.features, pairs.own, across=True, budget=pairs.budget)
        tau = keys.features.new_full((2, keys.own.stop - keys.own.start), self.settings.tau)
        sums = accumulate(keys, tau)
        return {"log_rate_of_keys": sums.total.log() + sums.peak / tau - math.log(keys.negatives)}

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        """DeCL algorithm 1, lines 8 to 10; eq 1 for several positives; appendix E."""
        settings, positive, log_sum = self.settings, anchors.positive / self.settings.tau, anchors.log_sum
        if len(positive) > 2:
            total, positive = _of_anchors(log_sum + positive), _of_anchors(positive)
            log_sum = total - positive
        log_r = log_sum + positive - math.log(anchors.candidates)
        if settings.rate == "momentum":
            log_rate = self.pool_log(rows["log_rate_of_keys"])
        else:
            log_rate = update_log_s(rows["log_rate"], self.pool_log(log_r.detach()), settings.gamma_at(progress))
        one, two = settings.weights(progress)
        loss1 = anchors.mean(self._auxiliary(log_rate, progress) * (log_r - log_rate).exp() - positive)
        loss2 = anchors.mean(log_sum)  # log_sum is relative to the positive, - log s+ in the paper
        metrics = self.by_side(log_rate_mean=log_rate.mean(1), share_unseen=share_unseen(rows["log_rate"]))
        return Outcome(one * loss1 + two * loss2, {"log_rate": log_rate, **log_g_rows(anchors, rows)}, metrics)

    def _auxiliary(self, log_rate: Tensor, progress: Progress) -> Tensor:
        """Return U_i · rate_i, [sides, b], or half of it for the geometric loss; the same on all ranks."""
        if self.settings.auxiliary == "mean":
            return torch.ones_like(log_rate)
        # Hashed, because a CPU generator uses only 32 bits of its seed.
        words = np.random.SeedSequence((self.settings.seed, progress.step)).generate_state(1)
        generator = torch.Generator(log_rate.device).manual_seed(int(words[0]))
        shape = 2 if self.settings.mixing == "geometric" else 1
        return log_rate.new_empty(shape, *log_rate.shape).exponential_(generator=generator).mean(0)


def _of_anchors(of_directions: Tensor) -> Tensor:
    """Return logs of means over each anchor's positives: [2 + 2m, b], where a local view has two -> [2 + m, b]."""
    of_local = torch.logaddexp(of_directions[2::2], of_directions[3::2]) - math.log(2)
    return torch.cat([of_directions[:2], of_local])
