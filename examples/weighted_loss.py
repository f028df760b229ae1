"""State for a loss without temperatures: python examples/weighted_loss.py data/glyphs runs/weighted_loss

Every sample has a moving average of its own loss. Samples that stay hard, beyond log(b) / 2, count less: on data from
the web they are often wrong captions. Afterwards the averages show which samples those are.
"""

import math
import sys

import torch
from torch.nn import functional as F

import thermopile


class WeightedSettings(thermopile.Settings):
    tau: float = 0.1
    memory: float = 0.9


class Weighted(thermopile.Objective):
    """CLIP's loss with a weight for each pair; `thermopile train --set objective.name=weighted_loss:Weighted`."""

    settings_of_mode = {"bimodal": WeightedSettings}

    def __init__(self, mode, settings):
        super().__init__(mode, settings)
        self.fields = {"pair/mean_loss": 0.0}  # one row for each pair; unseen ones have 0

    def loss(self, first, second, own, state, progress):
        # first, second: features of all ranks; own: the rows of this one
        logits, rows = first @ second.T / self.settings.tau, torch.arange(len(first), device=first.device)
        losses = sum(F.cross_entropy(each, rows, reduction="none") / 2 for each in (logits, logits.T))[own]
        memory, old = self.settings.memory, state["pair/mean_loss"]
        new = torch.where(state["visits"] == 0, losses, memory * old + (1 - memory) * losses).detach()
        weights = (math.log(len(first)) / 2 / new).clamp(max=1)  # of a guess the loss is log(b)
        return thermopile.Outcome((weights * losses).mean(), {"pair/mean_loss": new}, {"weight": weights.mean()})


def main(data, path, epochs=5):
    settings = {"epochs": int(epochs), "objective": {"name": "weighted_loss:Weighted"}, "data": {"image_size": 32}}
    with thermopile.Trainer.from_settings(path, data, settings) as trainer:
        trainer.train()
    rows = thermopile.open_run(path).temperatures().frame(columns=["caption", "pair/mean_loss"])
    print(rows.nlargest(5, "pair/mean_loss").to_string())


if __name__ == "__main__":
    main(*sys.argv[1:])
