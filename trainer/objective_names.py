"""Names of every objective's settings, without the objectives: a typo should not wait for torch, which they import."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from .errors import ConfigError

_ESTIMATOR = ("gamma", "gamma_min", "gamma_decay_epochs")
_BOUNDS = ("tau_min", "tau_max")
_ROBUST = (*_BOUNDS, "tau_init", "rho", "eta", "eta_min", "eta_decay_epochs", "grad_clip", *_ESTIMATOR, "eps")
_GLOBAL = (*_BOUNDS, "tau", "eta", "betas", *_ESTIMATOR, "eps")

SETTINGS: dict[str, tuple[str, ...]] = {
    name: ("similarity_budget", *own)
    for name, own in {
        "clip": ("log_logit_scale",),
        "simclr": ("tau",),
        "dcl": ("tau",),
        "dclw": ("tau", "sigma"),
        "sogclr": (*_ESTIMATOR, "eps", "tau"),
        "isogclr": (*_ROBUST, "beta_u"),
        "fastclip_v0": _GLOBAL,
        "fastclip_v1": (*_ESTIMATOR, "eps", "tau"),
        "fastclip_v2": (*_ROBUST, "betas"),
        "fastclip_v3": (*_GLOBAL, "rho"),
        "decl": (*_ESTIMATOR, "tau", "auxiliary", "mixing", "t0", "seed"),
        "auc_cl": ("a", "b", "alpha"),
    }.items()
}
"""Objective → its settings in all modes, as `OBJECTIVES` has them; their values are checked there."""


def refuse_unknown(objective: str, settings: Collection[str]) -> None:
    """Raise ConfigError for the first setting that the objective does not have; an unknown objective is passed over."""
    known = SETTINGS.get(objective, ())
    for key in settings:
        if known and key not in known:
            nearest = get_close_matches(key, known, n=1)
            hint = f" (did you mean '{nearest[0]}'?)" if nearest else ""
            raise ConfigError(f"'{objective}' has no setting '{key}'{hint}; valid: {', '.join(known)}")
