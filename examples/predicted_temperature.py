"""Temperatures that a small network predicts from the features, so that samples never trained on have one too (TempNet,
Qiu et al., ICML 2024, with a plain network).

PYTHONPATH=examples thermopile train --preset glyphs --data data/glyphs --out runs/predicted \\
  --set objective.name=predicted_temperature:Predicted --set objective.tau_max=0.2 --set objective.eta=0.003
"""

import torch
from torch import nn

import thermopile


class PredictedSettings(thermopile.EstimatorSettings, frozen=True):
    rho: float = 2.0
    tau_min: float = 0.005
    tau_max: float = 0.05
    eta: float = 3e-4  # the network's learning rate
    hidden: int = 64
    width: int = 256  # numbers per feature; thermopile train sets it to model.dim


class Predicted(thermopile.GlobalContrastive):
    """iSogCLR's loss, whose gradient in tau goes on to the networks: each side's own, or one for both views."""

    settings_of_mode = {"bimodal": PredictedSettings, "unimodal": PredictedSettings}

    def __init__(self, mode, settings):
        super().__init__(mode, settings, tau=settings.tau_max)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same networks on every rank
            self.networks = nn.ModuleDict({
                side: nn.Sequential(
                    nn.Linear(settings.width, settings.hidden), nn.Tanh(), nn.Linear(settings.hidden, 1), nn.Sigmoid()
                )
                for side in self.sides
            })  # fmt: skip
        self.temperature_rate = thermopile.TemperatureRate(settings.eta)

    def predict(self, side, features):
        """Temperatures of any samples, [n], from one side's features, [n, d], as `thermopile embed` writes them."""
        settings, network = self.settings, self.networks[side]
        dtype = next(network.parameters()).dtype
        shares = network(features.to(dtype)).squeeze(1).to(features)
        return settings.tau_min + (settings.tau_max - settings.tau_min) * shares

    def temperature(self, rows, features):
        sides = (self.sides * 2)[:2]  # two views have one network, and a sample the mean of its two temperatures
        return self.pool(torch.stack([self.predict(side, given) for side, given in zip(sides, features, strict=True)]))

    def loss(self, anchors, rows, progress):
        est, tau = self.estimate(anchors, rows, progress), anchors.tau[: len(self.sides)]
        pull = anchors.mean(est.ratio * anchors.tau.detach() * anchors.log_sum)  # in tau: -sum_j p_ij h_ij / tau
        value = anchors.mean(tau * (est.log_s_eps + self.settings.rho))  # in tau: log s + rho; together iSogCLR eq 13
        new = {"log_s": est.log_s, "tau": tau.detach()}
        return thermopile.Outcome(value + pull - pull.detach(), new, est.metrics | self.by_side(tau_mean=tau.mean(1)))
