"""DeCL: a contrastive loss whose normaliser is an auxiliary variable per sample (Chen et al., NeurIPS 2022)."""

import math
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from .base import Outcome, Progress, Settings
from .contrastive import Anchors, DoubtSettings, Rows, accumulate
from .distances import CosineOrDistance, SimilaritySettings
from .pairs import Pairs
from .sogclr import AverageSettings, log_g_rows, share_unseen, update_log_s


class DeclSettings(AverageSettings, SimilaritySettings, DoubtSettings, frozen=True):
    tau: float = Field(default=0.1, ge=1e-4, le=100.0)
    """Temperature, 0.0001 to 100."""
    auxiliary: Literal["sample", "mean"] = "sample"
    """The auxiliary variable U_i: a draw from its posterior Gamma(1, rate), or the posterior mean. DeCL algorithm 1."""
    mixing: Literal["loss1", "loss2", "alternate", "decay"] = "loss1"
    """Loss of a step: loss1 (as on ImageNet), loss2, both in turn (as with OpenCLIP), or a mixture in which loss1 has
    the weight 1 / (1 + t / t0). DeCL algorithm 1."""
    t0: float = Field(default=1000.0, gt=0.0)
    """Steps until loss1 has half the weight, above 0; used only with mixing = "decay"."""
    rate: Literal["moving_average", "momentum"] = "moving_average"
    """Source of a sample's rate: a moving average over steps, or a momentum encoder, whose keys of the batch are then
    both anchors and negatives; without keys, momentum is refused. DeCL section 2.2.3."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the draws, which depend only on it and the step: 0 to 2³¹ - 1; used only with auxiliary = "sample"."""

    def share_of_loss1(self, progress: Progress) -> float:
        """Return the weight of loss1 in this step; loss2 has the rest."""
        match self.mixing:
            case "loss1":
                return 1.0
            case "loss2":
                return 0.0
            case "alternate":
                return 1.0 - progress.step % 2
            case "decay":
                return 1.0 / (1.0 + progress.step / self.t0)


class Decl(CosineOrDistance):
    """Contrastive loss with decoupled normalisers, bimodal or unimodal.

    With r_i the mean of exp(sim / tau) over an anchor's negatives and rate a moving average of it:
    loss1 = mean_i(U_i · r_i - positive / tau), U_i = e_i / rate_i not differentiated, e_i of Exp(1) or 1 (`auxiliary`);
    loss2 = mean_i(log sum of exp(sim / tau) over negatives - positive / tau). Bimodal: the sum of both sides.
    State: log_rate of each side; with rate = "momentum" the last batch's, which no step reads; with `doubt_after` also
    log_g.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"bimodal": DeclSettings, "unimodal": DeclSettings}

    keys = "optional"
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
        settings, positive = self.settings, anchors.positive / self.settings.tau
        log_r = anchors.log_sum + positive - math.log(anchors.candidates)
        if settings.rate == "momentum":
            log_rate = self.pool_log(rows["log_rate_of_keys"])
        else:
            log_rate = update_log_s(rows["log_rate"], self.pool_log(log_r.detach()), settings.gamma_at(progress))
        one = settings.share_of_loss1(progress)
        loss1 = anchors.mean(self._auxiliary(log_rate, progress) * (log_r - log_rate).exp() - positive)
        loss2 = anchors.mean(anchors.log_sum)  # relative to the positive
        metrics = self.by_side(log_rate_mean=log_rate.mean(1), share_unseen=share_unseen(rows["log_rate"]))
        return Outcome(one * loss1 + (1 - one) * loss2, {"log_rate": log_rate, **log_g_rows(anchors, rows)}, metrics)

    def _auxiliary(self, log_rate: Tensor, progress: Progress) -> Tensor:
        """Return U_i · rate_i, [sides, b]; the same on every rank and after a resume."""
        if self.settings.auxiliary == "mean":
            return torch.ones_like(log_rate)
        # Hashed, because a CPU generator uses only 32 bits of its seed.
        words = np.random.SeedSequence((self.settings.seed, progress.step)).generate_state(1)
        generator = torch.Generator(log_rate.device).manual_seed(int(words[0]))
        return torch.empty_like(log_rate).exponential_(generator=generator)
