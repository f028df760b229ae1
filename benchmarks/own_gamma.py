"""A gamma for each sample (SCENT, arXiv 2602.02877), on SogCLR and iSogCLR: tried, and not kept (docs/bias.md)."""

from __future__ import annotations

import math

import torch

from thermopile.trainer.objectives import Progress
from thermopile.trainer.objectives.contrastive import Anchors, Rows
from thermopile.trainer.objectives.isogclr import Isogclr
from thermopile.trainer.objectives.sogclr import SILENT, Estimate, GlobalContrastive, Sogclr


class OwnGamma(GlobalContrastive):
    """Weight sigmoid(log s + log alpha), so that a large s falls in one visit, but at least the setting `gamma`.

    Without that floor, weights explode where s must rise.
    """

    alpha = 1.0

    def estimate(self, anchors: Anchors, rows: Rows, progress: Progress) -> Estimate:
        log_g, log_s = anchors.log_sum.detach() - math.log(anchors.candidates), rows["log_s"]
        gamma, new = torch.sigmoid(log_s + math.log(self.alpha)).clamp(min=self.settings.gamma), self.pool_log(log_g)
        log_s = torch.where(log_s.isneginf(), new, torch.logaddexp(log_s + (-gamma).log1p(), new + gamma.log()))
        ratio = (log_g - log_s).exp()
        silent = self.pool((ratio < SILENT).to(ratio.dtype)).mean(1)
        exponent = self.pool(ratio * anchors.mean_exponent)
        return Estimate(log_s, log_s, ratio, exponent, self.by_side(share_silent=silent))


class OfSogclr(OwnGamma, Sogclr):
    pass


class OfIsogclr(OwnGamma, Isogclr):
    pass
