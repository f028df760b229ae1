"""Which settings may change on resume."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...storage.place import Place
from ..config import EncoderConfig, TrainConfig, flat, load_recorded, to_tree
from ..encoders.initial_weights import is_same_source
from ..errors import ConfigError, RunError
from ..plugins import is_directory
from .build import device_named, objective_of
from .selection_files import SELECTING, as_recorded_file

_RESTORED = "it is restored from the checkpoint"

FIXED = {
    **dict.fromkeys(("seed", "batch_size", "order", "data.shares"), "it determines the order of the samples"),
    **dict.fromkeys(("model", "objective.name", "objective.mode", "optimizer.name"), "weights and state depend on it"),
    **dict.fromkeys((f"data.{name}" for name in SELECTING), "the run has its own copy; leave the option out"),
    "data.planted": "other samples were trained with their captions; a fork can set it to 0",
    "data.without": "the run has its own copy; to forget samples: thermopile fork RUN --out NEW --without FILE",
    "objective.learn_b": "it decides whether the checkpoint holds b",
    "objective.learn_scale": "the checkpoint's optimiser has the scale, or has not",
    "objective.tau_scale": "it decides what the checkpoint holds",
    "objective.similarity": "the weights were trained for it",
    "objective.tau_init": "unseen samples have the run's value",
    **{
        f"optimizer.{name}": _RESTORED
        for name in ("weight_decay", "betas", "eps", "momentum", "trust_coefficient", "layer_decay")
    },
    "init": "the run continues with its own weights",
}
"""Settings, and tables of settings, that must not change on resume, with the reason."""

FREE_TO_CHANGE = (
    "data.path",
    "data.parts",
    "data.tars",
    "data.cache",
    "data.workers",
    "data.ahead",
    "model.activation_checkpointing",
    "log_every",
    "on_nan",
    "trackers",
    "checkpoint.",
    "state.",
    "evaluation.",
)
"""Settings, and prefixes of settings, that affect no result, so they may change on resume."""


class Change(NamedTuple):
    key: str
    before: object
    after: object

    @property
    def arrow(self) -> str:
        """The change as text, such as `epochs: 20 → 40`; of a pinned file with the rows alone."""
        return re.sub("@([0-9]+)-[0-9a-f]{64}", r" (\1 rows)", f"{self.key}: {self.before} → {self.after}")

    def __str__(self) -> str:
        before, after = ("no such setting" if each is None else repr(each) for each in (self.before, self.after))
        return f"{self.key}: the run has {before}, asked for {after}"


def differences(run: TrainConfig, asked: TrainConfig) -> list[Change]:
    """Return the result-affecting settings that `asked` changes; None for a side that lacks the setting."""
    have, want = flat(to_tree(run)), flat(to_tree(asked))
    if {have["device"], want["device"]} == {"auto", device_named("auto").type}:
        want["device"] = have["device"]
    return [
        Change(key, have.get(key), want.get(key))
        for key in sorted(have.keys() | want.keys())
        if have.get(key) != want.get(key) and not key.startswith(FREE_TO_CHANGE)
    ]


def with_free(recorded: TrainConfig, now: TrainConfig) -> TrainConfig:
    """Return recorded settings with those of FREE_TO_CHANGE as they are now."""
    free: dict[str, Any] = {}
    for section, _, name in (key.partition(".") for key in FREE_TO_CHANGE):
        value, own = getattr(now, section), free.get(section, getattr(recorded, section))
        free[section] = own.model_copy(update={name: getattr(value, name)}) if name else value
    return recorded.model_copy(update=free)


def as_recorded(asked: TrainConfig, recorded: TrainConfig) -> TrainConfig:
    """Return `asked` with its sources as the run recorded them, if they are the same.

    So the command that started a run also resumes it, even if the source run has newer checkpoints by now, or the
    directory of a local model or a file of selected samples is gone. Reads nothing; `asked` is not resolved yet.
    """
    model = {
        side: _encoder_as_recorded(getattr(asked.model, side), getattr(recorded.model, side))
        for side in ("image", "text")
    }
    data: dict[str, object] = {
        name: as_recorded_file(getattr(asked.data, name), getattr(recorded.data, name)) for name in SELECTING
    }
    if model["image"] is not asked.model.image and asked.data.recipe == getattr(recorded.data.recipe, "name", ""):
        data["recipe"] = recorded.data.recipe  # with the model's normalisation
    init = {"run": recorded.init.run} if is_same_source(asked.init.run, recorded.init.run) else {}
    changed = {"model": model, "data": data, "init": init}
    return asked.model_copy(update={key: getattr(asked, key).model_copy(update=new) for key, new in changed.items()})


def _encoder_as_recorded(asked: EncoderConfig, recorded: EncoderConfig) -> EncoderConfig:
    if not is_directory(asked.name):
        return asked
    from ..encoders.hf_hub import hub_name

    path, hub = f"hf:{Path(asked.name.removeprefix('hf:')).expanduser().absolute()}", hub_name(asked.name)
    is_fixed = hub is not None and re.fullmatch(r"[0-9a-f]{40}", hub[1] or "") is not None
    at_its_revision = hub is not None and not is_fixed and recorded.name.startswith(f"hf:{hub[0]}@")
    if recorded.name not in (asked.name, path) and not at_its_revision:
        return asked
    return asked.model_copy(update={"name": recorded.name, "config": recorded.config | asked.config})


def changes_since(checkpoint: Place, settings: Mapping[str, Any], now: TrainConfig) -> list[Change]:
    """Return the changes that affect results between a checkpoint's settings and the run's resolved settings `now`.

    settings: from checkpoint.json. Raises ConfigError naming every change that no resumed run can make, RunError if
    this version does not know the settings.
    """
    before = settings_at(checkpoint, settings)
    changes = differences(before, now)
    if refused := impossible(changes, before):
        raise ConfigError(
            f"{checkpoint} was made with settings other than those in config.toml: "
            f"{'; '.join(refused.values())}. Copy the checkpoint's settings into config.toml and "
            "resume with --accept-config"
        )
    return changes


def settings_at(checkpoint: Place, settings: Mapping[str, Any]) -> TrainConfig:
    """Return a checkpoint's settings, given those in checkpoint.json. Raises RunError if this version does not."""
    try:
        return load_recorded(settings)
    except ConfigError as error:
        raise RunError(f"{checkpoint} is from another version of thermopile ({error}); resume it with that") from None


def impossible(changes: list[Change], recorded: TrainConfig) -> dict[str, str]:
    """Return key → reason for each impossible change: of FIXED settings, and of values that the objective learns."""
    learned, keys = [], {change.key for change in changes if change.key.startswith("objective.")}
    if keys and "objective.name" not in keys:  # which is impossible, and may be code to import
        # Initial values no longer matter; log_tau begins with `tau`.
        learned = [name.replace("log_tau", "tau") for name, _ in objective_of(recorded).named_parameters()]
    reasons = FIXED | {f"objective.{name}": _RESTORED for name in learned}
    return {
        change.key: f"{change} (cannot change: {why})"
        for change in changes
        for name, why in reasons.items()
        if within(change.key, [name])
    }


def within(key: str, names: Iterable[str]) -> bool:
    """Return whether a key, such as `optimizer.lr`, is one of the names or inside one: `optimizer` or `optimizer.`."""
    return any(key == name or key.startswith(f"{name.removesuffix('.')}.") for name in names)
