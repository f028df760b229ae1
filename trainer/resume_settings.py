"""What a resumed run may have otherwise than it was started with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .build import objective_of
from .config import EncoderConfig, TrainConfig, flat, load_config, to_tree
from .encoders import is_directory
from .encoders.initial_weights import is_same_source
from .errors import ConfigError, RunError

_ORDER = "the order of the samples follows from it"
_WEIGHTS = "the checkpoint's weights and state belong to it"
_BROUGHT = "the checkpoint brings its own"

FIXED = {
    "seed": _ORDER,
    "batch_size": _ORDER,
    "canonical_shards": _ORDER,
    "blocks_per_shard": _ORDER,
    "window_blocks": _ORDER,
    "model": _WEIGHTS,
    "objective.name": _WEIGHTS,
    "objective.mode": _WEIGHTS,
    "objective.tau_init": "samples not seen yet have the run's",
    "optimizer.name": _WEIGHTS,
    "optimizer.weight_decay": _BROUGHT,
    "optimizer.betas": _BROUGHT,
    "optimizer.eps": _BROUGHT,
    "optimizer.momentum": _BROUGHT,
    "optimizer.trust_coefficient": _BROUGHT,
    "init_from": "the run goes on with its own weights",
}
"""Settings, and tables of them, that no resumed run can change, and why."""


FREE_TO_CHANGE = (
    "data.path", "data.workers", "data.ahead", "model.activation_checkpointing", "log_every", "on_nan", "tensorboard",
    "checkpoint.", "state.", "evaluation.",
)  # fmt: skip
"""Settings, and beginnings of settings, that change no result, so that a resumed run may have others."""


class Change(NamedTuple):
    """A setting that is to be another than the run's."""

    key: str
    before: object
    after: object

    @property
    def arrow(self) -> str:
        """The change once it is made, as `epochs: 20 → 40`."""
        return f"{self.key}: {self.before} → {self.after}"

    def __str__(self) -> str:
        return f"{self.key}: the run has {_shown(self.before)}, asked for {_shown(self.after)}"


def differences(run: TrainConfig, asked: TrainConfig) -> list[Change]:
    """What `asked` would change in a run's results; a side that lacks a setting has None."""
    have, want = flat(to_tree(run)), flat(to_tree(asked))
    return [
        Change(key, have.get(key), want.get(key))
        for key in sorted(have.keys() | want.keys())
        if have.get(key) != want.get(key) and not key.startswith(FREE_TO_CHANGE)
    ]


def _shown(value: object) -> str:
    return "no such setting" if value is None else repr(value)


def as_recorded(asked: TrainConfig, recorded: TrainConfig) -> TrainConfig:
    """What is asked for, with its sources as the run recorded them where they are the same ones.

    So the line that started a run goes on with it, where the run that it started from has later checkpoints by now, and
    where the directory of a local model is gone. Nothing is read; `asked` is not resolved yet.
    """
    update: dict[str, object] = {
        side: _encoder_as_recorded(getattr(asked.model, side), getattr(recorded.model, side))
        for side in ("image", "text")
    }
    changed: dict[str, object] = {"model": asked.model.model_copy(update=update)}
    if is_same_source(asked.init_from, recorded.init_from):
        changed["init_from"] = recorded.init_from
    return asked.model_copy(update=changed)


def _encoder_as_recorded(asked: EncoderConfig, recorded: EncoderConfig) -> EncoderConfig:
    if not is_directory(asked.name):
        return asked
    from .encoders.hf_directory import folder_of

    if f"hf:{folder_of(asked.name)}" != recorded.name:
        return asked
    return EncoderConfig(name=recorded.name, config=recorded.config | asked.config)


def allowed_changes(run: Path, recorded: TrainConfig, asked: TrainConfig, allowed: Collection[str]) -> list[Change]:
    """What `asked` changes in the results of a run with the `recorded` settings; both are resolved.

    allowed: the settings, or tables of them, that may change. Raises ConfigError naming every change that may not.
    """
    changes = differences(recorded, asked)
    fixed = _fixed_settings(recorded)
    impossible = [(change, never) for change in changes if (never := _reason(change.key, fixed))]
    unnamed = [change for change in changes if not _reason(change.key, fixed) and not _within(change.key, allowed)]
    if impossible or unnamed:
        found = [f"{change} (cannot change: {never})" for change, never in impossible]
        names = " ".join(f"--allow-change {change.key}" for change in unnamed)
        raise ConfigError(
            f"{run} cannot be resumed with other settings: {'; '.join([*found, *map(str, unnamed)])}. "
            f"Leave them out{f', allow them with {names},' if names else ''} or start a new run with another --out."
        )
    return changes


def changes_since(checkpoint: Path, settings: Mapping[str, Any], now: TrainConfig) -> list[Change]:
    """What changes results in a run's settings, resolved, and was different when a checkpoint was made.

    settings: those of checkpoint.json. Raises ConfigError naming every change that no resumed run can make, RunError
    where this version does not know the settings.
    """
    try:
        before = load_config(settings)
    except ConfigError as error:
        raise RunError(f"{checkpoint} is of another version of thermopile ({error}); resume it with that one") from None
    changes, fixed = differences(before, now), _fixed_settings(before)
    if impossible := [f"{change} (cannot change: {why})" for change in changes if (why := _reason(change.key, fixed))]:
        raise ConfigError(
            f"{checkpoint} was made with other settings than config.toml has: {'; '.join(impossible)}. Write the "
            "checkpoint's into config.toml and resume with --accept-config"
        )
    return changes


def _fixed_settings(recorded: TrainConfig) -> dict[str, str]:
    """FIXED, with what the run's objective learns: its first value no longer counts."""
    objective = objective_of(recorded)
    learned = [name for name, _ in objective.named_parameters()]
    if objective.temperature_rate is not None:
        learned += ["eta", "betas"]  # of the temperature's optimiser, which the checkpoint brings
    return FIXED | {f"objective.{name}": _BROUGHT for name in learned}


def _reason(key: str, reasons: dict[str, str]) -> str | None:
    return next((why for name, why in reasons.items() if _within(key, [name])), None)


def _within(key: str, names: Iterable[str]) -> bool:
    """Whether a key, as `optimizer.lr`, is one of the names, or in a table of them: `optimizer` or `optimizer.`."""
    return any(key == name or key.startswith(f"{name.removesuffix('.')}.") for name in names)
