"""The settings with which a run starts or is resumed: read → merge → complete → compare, in this order.

`thermopile train` and `Run.from_settings` start alike. torch is imported late, so that most refusals come before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...pipeline.opening import Dataset, open_dataset
from ...state_store.ranks import agreement
from ...storage.place import Place, Places
from ..config import EncoderConfig, TrainConfig, load_config, to_tree
from ..config.layers import Layers
from ..errors import ConfigError
from ..plugins import ALLOW, OPEN_CLIP, TIMM, announce_code, code_in, is_directory, refuse_code
from ..run_directory import RunDirectory
from ..world import ALONE, World, refuse_separate_directories
from .own_dataset import open_own

if TYPE_CHECKING:
    from .build import Parts
    from .resume_settings import Change

NAME_IT = "name it in your settings, too"
Texts = Mapping[str, str]


@dataclass(frozen=True)
class Request:
    """Where a run is to start or to be resumed, and on what terms."""

    directory: RunDirectory | None
    """None: the settings alone are wanted."""
    trusted: Collection[str]
    """Origins of settings that may name code to import."""
    resume: bool = True
    """Resume the run in the directory, if there is one; otherwise one that is there is refused."""
    allowed: Collection[str] = ()
    """Settings, or tables of settings, that may differ from those of the run."""
    accept_edits: bool = False
    """Use a config.toml that was edited by hand."""
    allow_code: bool = False
    """Whether any file of settings may name code, and models to fetch."""
    only_show: bool = False
    """Whether nothing starts, so that the directory is not touched."""
    is_command: bool = False
    """Typed by a user: code is announced, models of the hub are fetched, and choices are explained."""


@dataclass(frozen=True)
class Start:
    """What a run starts with."""

    config: TrainConfig
    """Complete; as given if there is no dataset."""
    layers: Layers
    """The settings before they were completed, with their origins."""
    resume: bool
    parts: Parts | None = None
    """Made of the settings; None if there is no dataset."""
    changes: list[Change] = field(default_factory=list)
    """Of a resumed run's settings, those that affect results."""
    choices: list[str] = field(default_factory=list)
    """A line for each setting that was chosen from the dataset or by a model, for the user; on the first rank."""


def start(given: Layers, request: Request, world: World = ALONE) -> Start:
    """Return the settings to train with, from the given ones, and those of a run to resume. Writes nothing.

    Called by all ranks. Raises ConfigError for settings that do not fit, that a resumed run cannot change, or that name
    code which nobody allowed; RunError, RunExistsError, DatasetError, StateStoreError, OSError.
    """
    directory, recorded = request.directory, read(request, world)
    with agreement(world.control, ConfigError):
        layers = merge(recorded, given, directory.config_file if directory else None)
        asked = load_config(layers.tree)
        if not request.allow_code:
            cure, of_run = ALLOW if request.is_command else NAME_IT, code_in(recorded) if recorded else {}
            refuse_code_of_files(code_in(asked), of_run, layers.origins, request.trusted, cure)
        if request.is_command and world.is_first:
            announce_code(code_in(asked))
        dataset = _opened(asked.data.places, asked.data.tars, request, resume=recorded is not None)
    if request.is_command and recorded is None:
        has_text = asked.objective.mode != "unimodal" and (dataset is None or dataset.index.mode == "pairs")
        with agreement(world.slow_group, ConfigError):
            for side in ("image", "text") if has_text else ("image",):
                _fetch_named(side, getattr(asked.model, side), layers.origins, request)
    if dataset is None and not asked.init.run and world.size == 1:
        return Start(asked, layers, resume=False)
    config, parts = complete(asked, dataset, world, recorded)
    changes, choices = list["Change"](), list[str]()
    if dataset is not None and recorded is not None and directory is not None:
        from .build import resolve

        with agreement(world.control, ConfigError):
            if recorded != config:
                recorded, _ = resolve(recorded, dataset, world)  # settings added since then get their defaults
            changes = compare(directory.path, recorded, config, request.allowed)
    elif dataset is not None and request.is_command and not request.only_show:
        from .chosen_settings import choices_of

        with agreement(world.control, ConfigError):
            choices = choices_of(asked, config, dataset) if world.is_first else []
    return Start(config, layers, recorded is not None, parts, changes, choices)


def read(request: Request, world: World) -> TrainConfig | None:
    """Return the settings of the run to resume; None for a new run. Called by all ranks.

    Raises RunError if they are damaged or of another version, RunExistsError, OSError; ConfigError if the ranks see
    different directories.
    """
    directory, is_begun = request.directory, False
    with agreement(world.control, ConfigError):
        # Only one rank looks: on a network disk another would remember for a minute that a file is missing.
        if directory is not None and world.is_first:
            if not (request.resume or request.only_show):
                directory.refuse_existing()
            is_begun = request.resume and directory.exists()
    if not world.control.broadcast(is_begun) or directory is None:
        return None
    if not request.only_show:
        refuse_separate_directories(world, directory.path)
    with agreement(world.control, ConfigError):
        return directory.config(edited="accept" if request.accept_edits else "refuse")


def merge(recorded: TrainConfig | None, given: Layers, origin: Place | None) -> Layers:
    """Return the given settings over those of the run, if it has begun, whose origin is its file."""
    layers = Layers()
    if recorded is not None:
        layers.add(to_tree(recorded), str(origin))
    layers.put(given)
    return layers


def complete(
    asked: TrainConfig, dataset: Dataset | None, world: World = ALONE, recorded: TrainConfig | None = None
) -> tuple[TrainConfig, Parts | None]:
    """Return the settings with a value for all that they leave open, from dataset, models and machine, and the parts.

    dataset: None leaves all open but the step of `init.run`. recorded: settings of the run to resume, whose own copies
    of models and files count. Called by all ranks. Raises ConfigError as `resolve`, RunError for `init.run`.
    """
    from ..encoders.initial_weights import with_pinned_source
    from .build import resolve
    from .resume_settings import as_recorded

    if recorded is None and (asked.init.run or world.size > 1):  # ranks may differ here, and are refused later
        asked = with_pinned_source(asked, world)
    with agreement(world.control, ConfigError):
        own = asked if recorded is None else as_recorded(asked, recorded)
        return (own, None) if dataset is None else resolve(own, dataset, world)


def compare(run: Place, recorded: TrainConfig, asked: TrainConfig, allowed: Collection[str]) -> list[Change]:
    """Return the changes in `asked` that affect results, relative to the `recorded` settings; both are complete.

    allowed: settings, or tables of settings, that may change. Raises ConfigError naming every other change.
    """
    from .resume_settings import differences, impossible, within

    changes = differences(recorded, asked)
    refused = impossible(changes, recorded)
    unnamed = [change for change in changes if change.key not in refused and not within(change.key, allowed)]
    if refused or unnamed:
        names = " ".join(f"--allow-change {change.key}" for change in unnamed)
        raise ConfigError(
            f"{run} cannot be resumed with other settings: {'; '.join([*refused.values(), *map(str, unnamed)])}. "
            f"Omit them{f', allow them with {names},' if names else ''} or start a new run with another --out."
        )
    return changes


def refuse_code_of_files(
    asked: Texts, recorded: Texts, origins: Texts, trusted: Collection[str], cure: str = NAME_IT
) -> None:
    """Raise ConfigError for code that a file of settings names, which may come from someone else, and nobody trusted.

    asked, recorded: as `code_in`, of the settings and of the run to resume, whose settings are completed as well.
    """
    own = {key: code for key, code in asked.items() if origins[key] in trusted}
    for named, where in ((asked, ""), (recorded, "the run")):
        for key, code in named.items():
            if own.get(key) != code:
                refuse_code({key: code}, where or origins[key], cure)


def _opened(places: Places, tars: str, request: Request, *, resume: bool) -> Dataset | None:
    """Open the dataset of the settings; return None if a new run, which is only to be shown, names none."""
    if resume and request.directory is not None:
        return open_own(request.directory, places, tars, same=True)
    if places:
        return open_dataset(places, tars)
    if request.only_show or request.directory is None:
        return None
    none = f"{request.directory.path} has no run to resume, and a new one has " if request.resume else ""
    raise ConfigError(f"{none}no dataset: pass --data, a directory written by `thermopile convert`")


def _fetch_named(side: str, encoder: EncoderConfig, origins: Mapping[str, str], request: Request) -> None:
    """Fetch an encoder's model of the hub if trusted settings name it, not if a file of settings does.

    Raises ConfigError for weights of timm or open_clip that only a file names: they are fetched when encoders are made.
    """
    name, pretrained = encoder.name, encoder.config.get("pretrained", not encoder.name.startswith(TIMM))
    of_timm, has_weights = name.startswith(TIMM), name.startswith((TIMM, OPEN_CLIP)) and name.count(":") > 1
    keys = [f"model.{side}.name"] + [f"model.{side}.config.pretrained"] * (of_timm and not has_weights)
    is_trusted = request.allow_code or {origins.get(key) for key in keys} <= {*request.trusted}
    if (has_weights or (of_timm and pretrained)) and not is_trusted:
        raise ConfigError(
            f"a file of settings names {name}, whose weights would be fetched or read; type {' and '.join(keys)} "
            "with --set, or allow it with --allow-code"
        )
    if is_trusted and is_directory(name):  # or a name of the hub
        from ..encoders.hf_hub import snapshot

        snapshot(name, fetching=True, weights=bool(pretrained))
    elif name.startswith(OPEN_CLIP) and has_weights:  # its temperature is a setting
        from ..encoders.open_clip_encoders import weights_of

        weights_of(name.removeprefix(OPEN_CLIP), fetching=True)
