"""SogCLR: the global contrastive loss with one constant temperature (Yuan et al., ICML 2022; iSogCLR section 3)."""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from .base import Progress, Settings
from .contrastive import Anchors, Rows, Step
from .doubt import DoubtSettings
from .estimator import EstimatorSettings, GlobalContrastive


class SogclrSettings(EstimatorSettings, DoubtSettings, frozen=True):
    """Settings for image-text pairs."""

    tau: float = Field(default=0.03, ge=1e-4, le=100.0)
    """Temperature, 0.0001 to 100. The default is FastCLIP's for SogCLR (Appendix B)."""


class SogclrUnimodalSettings(SogclrSettings, frozen=True):
    """Settings for images."""

    tau: float = Field(default=0.1, ge=1e-4, le=100.0)
    """Temperature, 0.0001 to 100. iSogCLR tunes it in {0.1, 0.3, 0.5, 0.7} (section 6)."""


class Sogclr(GlobalContrastive):
    """Global contrastive loss, bimodal or unimodal.

    Value: (1/b) sum over samples and sides of tau · log(s' + eps). The gradient of the features is that of
    (1/b) sum p_ij h_ij with the weights p held constant. State: log_s of each side.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {
        "bimodal": SogclrSettings,
        "unimodal": SogclrUnimodalSettings,
    }

    keys: ClassVar[Literal["never", "optional", "always"]] = "optional"
    settings: SogclrSettings

    def __init__(self, mode: str, settings: SogclrSettings) -> None:
        super().__init__(mode, settings, log_s=-math.inf)

    def temperature(self, rows: Rows, like: Tensor) -> Tensor:
        return torch.full_like(rows["log_s"], self.settings.tau)

    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        est = self.estimate(anchors, rows, progress)
        value = self.settings.tau * anchors.weighted(est.log_s_eps).mean(1).sum()
        return Step(value, est.weight, rows={"log_s": est.log_s}, metrics=est.metrics)
