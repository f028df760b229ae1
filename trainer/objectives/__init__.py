"""The losses, by name. To add one: a file here, a line in OBJECTIVES, a test."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from .auc_cl import AucCl
from .barlow_twins import BarlowTwins
from .base import FeaturesError, Objective, Outcome, Progress, Settings
from .clip import Clip, Cyclip
from .decl import Decl
from .fastclip import FastclipV0, FastclipV1, FastclipV2, FastclipV3
from .isogclr import Isogclr
from .moco_v3 import MocoV3
from .ntxent import Dcl, Dclw, Flatnce, Simclr
from .siglip import Siglip
from .simco import Simco
from .sogclr import Sogclr
from .spectral import Spectral
from .vicreg import Vicreg

__all__ = ["OBJECTIVES", "FeaturesError", "Objective", "Outcome", "Progress", "create_objective"]

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


def create_objective(name: str, mode: str = "bimodal", **settings: Any) -> Objective:
    """Create the objective `name` of OBJECTIVES. mode: "bimodal" (image-text pairs) or "unimodal" (two views).

    settings: keyword arguments of its settings model, `OBJECTIVES[name].settings_of_mode[mode]`; "none" is the default.
    Raises ValueError for an unknown name, mode or setting, and for a value out of range.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective '{name}' is unknown{_nearest(name, OBJECTIVES)}; valid: {', '.join(OBJECTIVES)}")
    models = OBJECTIVES[name].settings_of_mode
    if mode not in models:
        raise ValueError(f"objective '{name}' has no mode '{mode}'{_nearest(mode, models)}; valid: {', '.join(models)}")
    return OBJECTIVES[name](mode, _check_settings(name, models[mode], settings))


def _check_settings(name: str, model: type[Settings], settings: dict[str, Any]) -> Settings:
    known = model.model_fields
    for key in settings:
        if key not in known:
            raise ValueError(f"'{name}' has no setting '{key}'{_nearest(key, known)}; valid: {', '.join(known)}")
    try:
        return model(**{key: value for key, value in settings.items() if value != "none"})
    except ValidationError as error:
        raise ValueError(f"objective '{name}': {'; '.join(_describe(part) for part in error.errors())}") from None


def _describe(part: Any) -> str:
    """Describe one pydantic error in one line: the setting, its value and the allowed values."""
    if part["loc"]:
        return f"{part['loc'][0]} = {part['input']!r}: {part['msg']}"
    return str(part["msg"]).removeprefix("Value error, ")


def _nearest(given: str, valid: Iterable[str]) -> str:
    nearest = get_close_matches(str(given), list(valid), n=1)
    return f" (did you mean '{nearest[0]}'?)" if nearest else ""
