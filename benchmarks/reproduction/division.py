"""The rival: one more pass over the data before every epoch, a mixture of two Gaussians on the losses, one kept.

NCR (Huang et al., NeurIPS 2021) section 3.2, without its second network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor
from torch.nn import functional as F

from thermopile.storage.place import AnyPlace
from thermopile.trainer.evaluation.features import some_features
from thermopile.trainer.loop import Trainer
from thermopile.trainer.objectives.base import WEIGHT
from thermopile.trainer.objectives.contrastive import LEAST_MEAN, Contrastive
from thermopile.trainer.run.build import recipe_named
from thermopile.trainer.run.run import Run

MIXTURE = {"n_components": 2, "max_iter": 10, "tol": 1e-2, "reg_covar": 5e-4, "random_state": 0}
"""Those of NCR's code."""


def train_with(
    taking: Callable[[Run, Any], Any], path: AnyPlace, data: AnyPlace, settings: dict[str, Any], value: Any
) -> None:
    """Train to the end with states by `taking(run, value).take`. settings: a tree, without `doubt_after`."""
    with Trainer.from_settings(path, data, settings) as trainer:
        trainer.run.take = taking(trainer.run, value).take  # type: ignore[method-assign]
        trainer.train()


def features_of(run: Run) -> list[Tensor]:
    """Return the features of all pictures and of all captions, float32 [n, d] each."""
    run.encoders.eval()
    batches = some_features(run.encoders, run.dataset, np.arange(run.dataset.n),
                            recipe_named(run.config.data.recipe), run.config.data.image_size, run.device)  # fmt: skip
    sides = [torch.cat(side) for side in zip(*batches, strict=True)]
    run.encoders.train()
    return sides


class Divided:
    """The states of a run's samples, which leave out the pairs of the mixture's upper half; not to be resumed."""

    def __init__(self, run: Run, after: int) -> None:
        """after: epochs before the first division."""
        self._run, self._take, self._after = run, run.take, after
        self._kept: Tensor | None = None

    def take(self, sample_ids: Tensor) -> dict[str, Tensor]:
        run, state = self._run, self._take(sample_ids)
        assert isinstance(run.objective, Contrastive)
        if run.progress.epoch >= self._after:
            if self._kept is None or run.steps_done % run.order.steps_per_epoch == 0:
                self._kept = kept(self._losses(state))
            weights = self._kept[sample_ids]
            state[WEIGHT] = (
                weights / weights.mean().clamp(min=LEAST_MEAN) if run.objective.doubt_keeps_mean else weights
            )
        return state

    def _losses(self, state: dict[str, Tensor]) -> Tensor:
        """The loss of every pair among others of a batch, float32 [n], at the mean temperature."""
        run = self._run
        assert isinstance(run.objective, Contrastive)
        of_batch = [values.mean() for name, values in state.items() if name.endswith("/tau")]
        tau = torch.stack(of_batch).mean() if of_batch else run.objective.temperature({}, torch.zeros(1))
        sides = features_of(run)
        losses = torch.empty(run.dataset.n)
        for ids in np.array_split(np.random.default_rng(run.steps_done).permutation(run.dataset.n),
                                  run.dataset.n // run.config.batch_size):  # fmt: skip
            logits, own = sides[0][ids] @ sides[1][ids].T / tau.detach(), torch.arange(len(ids))
            losses[ids] = sum(F.cross_entropy(of_side, own, reduction="none") for of_side in (logits, logits.T))
        return losses


def kept(losses: Tensor) -> Tensor:
    """Return 1 for the losses, float32 [n], that rather are of the mixture's lower half, and 0 for the others."""
    scaled = ((losses - losses.min()) / (losses.max() - losses.min())).numpy()[:, None]
    mixture = GaussianMixture(**MIXTURE).fit(scaled)
    return torch.from_numpy(mixture.predict_proba(scaled)[:, mixture.means_.argmin()] > 0.5).float()
