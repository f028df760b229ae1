"""Initialise a new run's encoders from another run: `--init-from`."""

import logging
import re
from typing import Literal

from torch import Tensor, nn

from ...state_store.ranks import agreement
from ...storage.place import Place, place_of
from ..checkpoints.checkpoint_files import LATEST, checkpoints_in, load_checkpoint
from ..config import TrainConfig
from ..errors import ConfigError, RunError
from ..run_directory import RunDirectory, find_checkpoint
from ..world import World
from . import Encoders

_log = logging.getLogger(__name__)


def pinned(source: str) -> str:
    """Return RUN or RUN@step-N with an absolute path and a step, by default the latest checkpoint's.

    Raises RunError if the run or checkpoint does not exist, listing the existing ones.
    """
    path, step = parts_of(source)
    run = RunDirectory(path)
    if not run.exists():
        raise RunError(f"--init-from {source}: {path} is not a run; give a run's directory, or RUN@step-N")
    try:
        return f"{path}@{find_checkpoint(run, step or LATEST).name}"
    except RunError as error:
        raise RunError(f"--init-from {source}: {error}") from None


def with_pinned_source(config: TrainConfig, world: World) -> TrainConfig:
    """Return a new run's settings with `init.run` pinned by `pinned`. Called by all ranks; raises as `pinned`."""
    source = ""
    with agreement(world.control, RunError):
        if config.init.run and world.is_first:
            source = pinned(config.init.run)
    # Use one rank's answer: the other run may still be training and have a newer checkpoint by now.
    asked, source = world.control.broadcast((config.init.run, source))
    if config.init.run != asked:  # refused later, with the rank's other differences
        return config
    return config.model_copy(update={"init": config.init.model_copy(update={"run": source})})


def is_same_source(source: str, recorded: str) -> bool:
    """Return whether `source`, RUN or RUN@step-N, may mean the recorded, pinned source; reads nothing."""
    if not (source and recorded):
        return source == recorded
    (path, step), (recorded_path, recorded_step) = parts_of(source), parts_of(recorded)
    return path == recorded_path and step in (None, recorded_step)


def load_initial_weights(encoders: Encoders, source: str, sides: Literal["both", "image", "text"] = "both") -> None:
    """Load the weights of a checkpoint, as returned by `pinned`, into each network that both runs have.

    sides: which encoders; a predictor belongs to the image side. An encoder named there must be in both runs. Any other
    network that the other run lacks, such as a text encoder or a predictor, stays newly initialised, with a warning. A
    momentum network starts as the image encoder, as in every new run. Raises RunError if the checkpoint is missing or
    damaged, ConfigError if its encoders have other shapes or lack the side.
    """
    if sides == "text" and encoders.text is None:
        raise ConfigError("init.sides = 'text', but a run on images has no text encoder; use 'image'")
    path, step = parts_of(source)
    if (checkpoint := path / "checkpoints" / str(step)) not in checkpoints_in(path / "checkpoints").values():
        raise RunError(f"{checkpoint}, which the run starts from, is missing; start a new run with another --init-from")
    weights = load_checkpoint(checkpoint)[1].get("encoders")
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise RunError(f"{checkpoint} contains no encoders: it is not a checkpoint of a run")
    for side, network in encoders.named_children():
        if network is encoders.momentum or sides == ("image" if network is encoders.text else "text"):
            continue
        own = {name.removeprefix(f"{side}."): value for name, value in weights.items() if name.startswith(f"{side}.")}
        if own:
            _load(network, own, side, checkpoint)
        elif side == sides:
            raise ConfigError(f"init.sides = {sides!r}, but {checkpoint} has no {side} encoder; start from another run")
        else:
            what = "predictor" if network is encoders.predictor else f"{side} encoder"
            _log.warning("%s has no %s; this run initialises its own", checkpoint, what)
    if encoders.momentum is not None:
        encoders.momentum.load_state_dict(encoders.image.state_dict())


def _load(network: nn.Module, weights: dict[str, Tensor], side: str, checkpoint: Place) -> None:
    wanted: dict[str, Tensor] = network.state_dict()
    for name in sorted(wanted.keys() | weights.keys()):
        have, want = (list(each[name].shape) if name in each else "none" for each in (weights, wanted))
        if have != want:
            raise ConfigError(
                f"init.run: {checkpoint} has other encoders: {side}.{name} is {have} there, but {want} in this run. "
                "Use the `model` settings and the tokenizer of that run"
            )
    network.load_state_dict(weights)


def parts_of(source: str) -> tuple[Place, str | None]:
    """Return the absolute path of `init.run`'s run, and if given the checkpoint's name, in a bucket step-N.TERM."""
    parts = re.fullmatch(r"(?P<run>.+?)(?:@(?P<step>step-[0-9]+(?:\.[0-9a-f]{8})?))?", source, re.DOTALL)
    if parts is None:
        raise ConfigError(f"init.run = {source!r} is neither a run's directory nor RUN@step-N")
    return place_of(parts["run"]).resolve(), parts["step"]
