"""The rival: one more pass over the data before every epoch, a mixture of two Gaussians on the losses, one kept.

NCR (Huang et al., NeurIPS 2021) section 3.2, without its second network.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor
from torch.nn import functional as F

from thermopile.storage.place import AnyPlace
from thermopile.trainer.evaluation.features import sample_features
from thermopile.trainer.loop import Trainer
from thermopile.trainer.objectives.base import WEIGHT
from thermopile.trainer.objectives.contrastive import LEAST_MEAN, Contrastive
from thermopile.trainer.run.build import recipe_named

MIXTURE = {"n_components": 2, "max_iter": 10, "tol": 1e-2, "reg_covar": 5e-4, "random_state": 0}
"""Those of NCR's code."""


def train_divided(path: AnyPlace, data: AnyPlace, settings: dict[str, Any], after: int) -> None:
    """Train to the end. settings: a tree, without `doubt_after`; after: epochs before the first division."""
    with DividingTrainer.from_settings(path, data, settings) as trainer:
        trainer.after = after
        trainer.run()


class DividingTrainer(Trainer):
    """A trainer that leaves out the pairs of the mixture's upper half; not to be resumed."""

    after: int
    _kept: Tensor | None = None

    def _take(self, sample_ids: Tensor) -> dict[str, Tensor]:
        state = super()._take(sample_ids)
        assert isinstance(self.objective, Contrastive)
        if self.progress.epoch >= self.after:
            if self._kept is None or self.steps_done % self.order.steps_per_epoch == 0:
                self._kept = kept(self._losses(state))
            weights = self._kept[sample_ids]
            state[WEIGHT] = (
                weights / weights.mean().clamp(min=LEAST_MEAN) if self.objective.doubt_keeps_mean else weights
            )
        return state

    def _losses(self, state: dict[str, Tensor]) -> Tensor:
        """The loss of every pair among others of a batch, float32 [n], at the mean temperature."""
        assert isinstance(self.objective, Contrastive)
        of_batch = [values.mean() for name, values in state.items() if name.endswith("/tau")]
        tau = torch.stack(of_batch).mean() if of_batch else self.objective.temperature({}, torch.zeros(1))
        self.encoders.eval()
        sides = sample_features(self.encoders, self.dataset, np.arange(self.dataset.n),
                                recipe_named(self.config.data.recipe), self.config.data.image_size, self.device,
                                lambda *_: None)  # fmt: skip
        self.encoders.train()
        losses = torch.empty(self.dataset.n)
        for ids in np.array_split(np.random.default_rng(self.steps_done).permutation(self.dataset.n),
                                  self.dataset.n // self.config.batch_size):  # fmt: skip
            logits, own = sides[0][ids] @ sides[1][ids].T / tau.detach(), torch.arange(len(ids))
            losses[ids] = sum(F.cross_entropy(of_side, own, reduction="none") for of_side in (logits, logits.T))
        return losses


def kept(losses: Tensor) -> Tensor:
    """Return 1 for the losses, float32 [n], that rather are of the mixture's lower half, and 0 for the others."""
    scaled = ((losses - losses.min()) / (losses.max() - losses.min())).numpy()[:, None]
    mixture = GaussianMixture(**MIXTURE).fit(scaled)
    return torch.from_numpy(mixture.predict_proba(scaled)[:, mixture.means_.argmin()] > 0.5).float()
