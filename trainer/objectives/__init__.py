"""The losses, by name. To add a loss: a file, a line in OBJECTIVES, a test; or `module:name`, with no line here."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import ValidationError

from ..config import FROZEN, explained, nearest
from ..plugins import installed, is_plugin, load_plugin
from .base import FeaturesError, Objective, Outcome, Progress, Settings
from .clip import Clip, Cyclip, Siglip
from .decl import Decl
from .fastclip import FastclipV0, FastclipV1, FastclipV2, FastclipV3
from .frozen import Frozen
from .gathering import Frame, GlobalBatch
from .isogclr import Isogclr
from .ntxent import Dcl, Dclw, Flatnce, MocoV3, Simclr, Simco
from .quadratic import AucCl, Spectral
from .redundancy import BarlowTwins, Vicreg
from .sogclr import Sogclr

__all__ = ["OBJECTIVES", "FeaturesError", "Objective", "Outcome", "Progress", "Settings", "create_objective"]

OBJECTIVES: dict[str, type[Objective]] = {
    "clip": Clip,
    "cyclip": Cyclip,
    "siglip": Siglip,
    "simclr": Simclr,
    "dcl": Dcl,
    "dclw": Dclw,
    "flatnce": Flatnce,
    "simco": Simco,
    "moco_v3": MocoV3,
    "spectral": Spectral,
    "barlow_twins": BarlowTwins,
    "vicreg": Vicreg,
    "sogclr": Sogclr,
    "isogclr": Isogclr,
    "fastclip_v0": FastclipV0,
    "fastclip_v1": FastclipV1,
    "fastclip_v2": FastclipV2,
    "fastclip_v3": FastclipV3,
    "decl": Decl,
    "auc_cl": AucCl,
}
Objective.known = OBJECTIVES


def create_objective(name: str, mode: str = "bimodal", **settings: Any) -> Objective:
    """Create the objective `name` of OBJECTIVES. mode: "bimodal" (image-text pairs) or "unimodal" (two views).

    settings: keyword arguments of its settings model, `settings_of_mode[mode]` of its class; "none" is the default.
    Raises ValueError for an unknown name, mode or setting, and for a value out of range; for `module:name`, also if
    the object is no objective or cannot take a step.
    """
    return objective_with(name, mode, checked_settings(name, mode, settings))


def objective_with(name: str, mode: str, settings: Settings) -> Objective:
    """As `create_objective`, with settings as `checked_settings` returns them."""
    known = objective_class(name)
    if not known.__module__.startswith(__name__):
        return tried(name, lambda: known(mode, settings))
    try:
        objective = known(mode, settings)
    except ValueError as error:
        raise ValueError(f"objective '{name}': {error}") from None
    objective.name = name
    return objective


def objective_class(name: str) -> type[Objective]:
    """Return the class of that name, or the user's own for `module:name` or an entry point, which runs that module.

    Raises ValueError if the class does not exist.
    """
    own = name if is_plugin(name) or name in OBJECTIVES else installed("objectives").get(name, name)
    if not is_plugin(own):
        if name == "tempnet":
            raise ValueError(
                "objective 'tempnet' is no longer here: examples/predicted_temperature.py is its loss, with a network "
                "of your own; a run of tempnet goes on only with the version that began it"
            )
        if name == FROZEN:  # of `thermopile score`, which trains nothing
            return Frozen
        if name not in OBJECTIVES:
            near = nearest(name, OBJECTIVES)
            raise ValueError(f"objective '{name}' is unknown{near}; valid: {', '.join(OBJECTIVES)}, module:name")
        return OBJECTIVES[name]
    found: type[Objective] = load_plugin(own, f"objective '{name}'")
    models: Any = getattr(found, "settings_of_mode", None)
    is_one = isinstance(found, type) and issubclass(found, Objective) and isinstance(models, dict) and models
    if not is_one or not all(isinstance(model, type) and issubclass(model, Settings) for model in models.values()):
        raise ValueError(
            f"objective '{name}' is not a class derived from thermopile.Objective that has "
            "settings_of_mode, such as {'unimodal': thermopile.Settings}"
        )
    return found


def tried(name: str, make: Callable[[], Objective], rows: int = 4) -> Objective:
    """Create a user's objective and take a step of it, so that its errors appear before the run begins."""
    try:
        objective = make()
        objective.name = name
        width = getattr(objective.settings, "width", 8)
        alike = torch.eye(2, width)[:, None].repeat(1, rows, 1)
        features = torch.nn.functional.normalize(alike + torch.eye(rows, width), dim=2)
        state = {field: torch.full((rows,), value) for field, value in objective.fields.items()}
        state |= {"visits": torch.zeros(rows, dtype=torch.uint32)} if state else {}
        with torch.no_grad():
            value = objective.step(Frame.of(features, None, GlobalBatch(0, 1)), state, Progress(0, 1)).loss
    except Exception as error:  # a user's class may raise anything
        raise ValueError(
            f"objective '{name}' fails on a batch of {rows}: {type(error).__name__}: {error}. "
            "thermopile.testing.check_objective says what it must do"
        ) from error
    if not value.isfinite():
        raise ValueError(f"objective '{name}': its loss on a batch of {rows} is {float(value)}; it must be finite")
    return objective


def checked_settings(name: str, mode: str, settings: Mapping[str, Any]) -> Settings:
    """Return an objective's settings with their defaults. Raises ValueError as `create_objective`."""
    models = objective_class(name).settings_of_mode
    if mode not in models:
        raise ValueError(f"objective '{name}' has no mode '{mode}'{nearest(mode, models)}; valid: {', '.join(models)}")
    known = models[mode].model_fields
    for key in settings:
        if key not in known:
            raise ValueError(f"'{name}' has no setting '{key}'{nearest(key, known)}; valid: {', '.join(known)}")
    try:
        return models[mode](**{key: value for key, value in settings.items() if value != "none"})
    except ValidationError as error:
        raise ValueError(f"objective '{name}': {explained(error)}") from None
