"""Pairs judged by a model that is not trained: log s, margin, similarity, and the temperature at which rho binds."""

import math
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from ..config import RANDOM
from ..solved_temperatures import Bounds, solve
from .base import Objective, Outcome, Progress, State
from .contrastive import accumulate
from .gathering import Frame
from .sogclr import BoundedTau

SIMILARITY = "pair/similarity"
"""Field of a pair's cosine."""


class FrozenSettings(BoundedTau, frozen=True):
    """Settings of a pass without training."""

    tau: float = Field(default=0.05, ge=1e-4, le=100.0)
    """Temperature of log s, within tau_min and tau_max; of a whole CLIP or SigLIP its own."""
    rho: float = Field(default=1.0, gt=0.0)
    """KL divergence from uniform of a sample's weights at its temperature, above 0. iSogCLR eq 7."""

    first_tau = "tau"


class Frozen(Objective):
    """Compare every pair of a batch with the batch's others; no gradient.

    State: log_s = log mean_j exp((S_ij - S_ii) / tau), tau where rho binds, within its bounds, and the margin
    S_ii - max_j S_ij, of each side; SIMILARITY and RANDOM of the pair. A random pair stands for a caption as wrong as
    another sample's, as a planted one does in training. Value: tau times the mean of log s, summed over the sides.
    """

    settings_of_mode: ClassVar = {"bimodal": FrozenSettings}
    is_whole = is_frozen = True
    settings: FrozenSettings

    def __init__(self, mode: str, settings: FrozenSettings) -> None:
        super().__init__(mode, settings, log_s=-math.inf, tau=settings.tau, margin=0.0)
        self.fields |= {SIMILARITY: 0.0, RANDOM: 0.0}

    def step(self, frame: Frame, state: State, progress: Progress) -> Outcome:
        settings, own, pairs = self.settings, frame.own, self.compared(frame)
        positive, tau = pairs.positives[own], settings.tau
        sums = accumulate(pairs, positive.new_full((2, len(positive)), tau))
        log_s = sums.total.log() + (sums.peak - positive) / tau - math.log(pairs.negatives)
        margin = positive - sums.peak
        features = [side.cpu().numpy() for side in frame.targets.float()]
        bounds, places = Bounds(settings.rho, settings.tau_min, settings.tau_max), np.arange(own.start, own.stop)
        solved = [
            solve([anchors[own]], [others], places, bounds, population=1 << 62).tau  # many batches
            for anchors, others in (features, features[::-1])
        ]
        taus = torch.from_numpy(np.stack(solved)).to(positive).clamp(settings.tau_min, settings.tau_max)
        pictures, captions = frame.targets[:, own]
        # Of picture i with the next caption k, h is higher by S_ii - S_ik in one sum and by S_kk - S_ik in the other.
        lift = positive + positive.roll(-1) - 2 * (pictures * captions.roll(-1, 0)).sum(1)
        pair = {SIMILARITY: positive, RANDOM: log_s[0] + log_s[1].roll(-1) + lift / tau}
        rows = {"log_s": log_s, "tau": taus, "margin": margin}
        new = {f"{side}/{name}": of[k] for name, of in rows.items() for k, side in enumerate(self.sides)} | pair
        of_batch = frame.ranks.gather(torch.cat([log_s, margin, taus]))
        means = self.by_side(log_s_mean=of_batch[:2].mean(1), tau_mean=of_batch[4:].mean(1))
        loss = tau * of_batch[:2].mean(1).sum()
        new = {name: of.to(state[name].dtype) for name, of in new.items()}
        return Outcome(loss, new, means | self.retrieval(of_batch[2:4]))
