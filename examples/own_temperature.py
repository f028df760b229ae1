"""A rule of your own by which each sample's temperature moves; this one is iSogCLR's.

PYTHONPATH=examples thermopile train --preset glyphs --data data/glyphs --out runs/own \\
  --set objective.name=own_temperature:Own --set objective.rho=2 --set objective.tau_init=0.05 --set objective.eta=0.005
"""

import thermopile


class OwnSettings(thermopile.RobustSettings, frozen=True):
    beta_u: float = 0.9


class Own(thermopile.IndividualTemperature):
    settings_of_mode = {"bimodal": OwnSettings, "unimodal": OwnSettings}
    keys = "optional"
    averages = {"u": 0.0}

    def move(self, rows, gradient, progress):
        u = (1 - self.settings.beta_u) * rows["u"] + self.settings.beta_u * gradient
        return {"tau": self.settings.stepped(rows["tau"], -self.settings.eta_at(progress) * u), "u": u}
