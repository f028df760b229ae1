"""Open a run: its ranks' common starting point, and the samples' state at that point."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from ..._version import __version__
from ...pipeline.errors import DatasetError
from ...pipeline.opening import Dataset, open_dataset
from ...pipeline.order.order import ORDER_VERSION
from ...state_store.errors import StoreLockedError
from ...state_store.ranks import agreement
from ...state_store.reader import StateReader
from ...state_store.store import StateStore, writer_lock
from ...storage.place import Lock, Place
from ...storage.selection import Selection
from ..checkpoints.checkpoint_files import CheckpointInfo, Loaded, latest_checkpoint, load_latest, read_info
from ..checkpoints.tensors import join, take_apart
from ..config import TrainConfig, flat, to_tree
from ..encoders.initial_weights import parts_of
from ..encoders.locking import starts_trained
from ..errors import ConfigError, RunError, one_line
from ..objectives import Objective
from ..optim import rate_jump
from ..plugins import OPEN_CLIP, TIMM
from ..run_directory import RunDirectory, read_lineage
from ..world import World
from .own_dataset import growth, open_own
from .resume_settings import changes_since, settings_at
from .selection_files import check_own_copy, selects

MAY_DIFFER = frozenset({"data.path", "data.parts", "data.tars", "data.workers", "evaluation.test", "evaluation.train"})
"""Settings that may differ between ranks: dataset paths, because fingerprints are compared, and the number of decoding
cores. All others must be equal."""

MAX_NAMED = 10
LOSS_SCALE = "loss_scale"

_log = logging.getLogger(__name__)


def find_start(
    config: TrainConfig, run: RunDirectory, world: World, dataset: Dataset | None, *, resume: bool
) -> tuple[Dataset, Loaded | None]:
    """Return the run's dataset, and the newest intact checkpoint when resuming. Called by all ranks.

    dataset: the run's, if it is open already. Writes nothing.
    Raises ConfigError, RunError, DatasetError, OSError; on every rank if one fails or they differ.
    """
    with agreement(world.control, RunError):
        if world.is_first:
            run.refuse_unusable()
        if dataset is None:
            at = config.data.places, config.data.tars
            dataset = open_own(run, *at) if resume else open_dataset(*at)
        for line in growth(run, config, dataset) if world.is_first else ():
            _log.warning("%s", line)
        if resume and world.is_first and selects(config.data):
            check_own_copy(config.data, Selection(run.selection))
    start = newest(config, run, world) if resume else None
    with agreement(world.control, RunError):
        if resume and start is None:
            refuse_published(config, run)
        own = facts(config, dataset)
    refuse_differences(world, own)
    if resume and start is None and world.is_first:
        lineage = read_lineage(run.lineage_file)
        if not (lineage and lineage.origins and lineage.origins[-1].step == 0):  # a fork that begins again has none
            _log.warning("%s has no checkpoint: the run starts over at step 0", run.path)
    return dataset, start


def refuse_published(config: TrainConfig, run: RunDirectory) -> None:
    """Raise RunError if a run that begins from its files would fetch weights: it may be from someone else."""
    for side, encoder in (("image", config.model.image), ("text", config.model.text)):
        if encoder.name.startswith((TIMM, OPEN_CLIP)) and starts_trained(encoder):
            typed = quote(f"model.{side}.name={encoder.name}")  # weights are fetched for a name that the user types
            anew = f"thermopile train --config {quote(str(run.config_file))} --set {typed} …"
            raise RunError(f"{run.path} would fetch {encoder.name}; begin anew: {anew}")


def take_lock(
    config: TrainConfig, run: RunDirectory, start: Loaded | None, world: World, *, resume: bool, until: ExitStack
) -> tuple[Lock | None, Loaded | None]:
    """Take the run's writer lock on rank 0, before anything is written; return it and the checkpoint to resume from.

    start: the newest checkpoint before; one that another process has written since is read here, once, because no other
    process writes under the lock. until: releases the lock. Called by all ranks. Raises RunExistsError for a new run as
    `refuse_existing`, and if another start is just creating it; StoreLockedError if another process writes the run;
    RunError as `find_start`, and if the settings have changed since `start`; OSError.
    """
    lock, is_newest = None, True
    with agreement(world.control, RunError):
        if world.is_first:
            if not resume:
                run.refuse_existing()  # an occupied directory gets no lock
            try:
                lock = writer_lock(run.state)
            except StoreLockedError as error:
                raise (error if resume else run.taken()) from None
            until.callback(lock.release)
            is_newest = not resume or latest_checkpoint(run.checkpoints) == (start and start.newest)
    if world.control.broadcast(is_newest):
        return lock, start
    later = newest(config, run, world)
    with agreement(world.control, RunError):
        before = settings_at(start.path, start.info.settings) if start else config
        if later is None or changes_since(later.path, later.info.settings, before):
            raise RunError(f"another process has just changed the settings or checkpoints of {run.path}; resume again")
    return lock, later


def restore(start: Loaded, store: StateStore, parts: dict[str, Any]) -> int:
    """Load a checkpoint into the parts of the model, by name; return the number of rows refused until then.

    Raises RunError if the checkpoint does not fit them or the samples' state.
    """
    path, info, training, _ = start
    if info.step != (taken_at := store.last_snapshot.step):
        raise RunError(f"{path} is damaged: it is of step {info.step}, its state snapshot of step {taken_at}")
    try:
        for name, part in parts.items():
            if name != LOSS_SCALE or training.get(name):  # empty without fp16
                part.load_state_dict(training.pop(name))  # its memory is not needed again
        return int(training.get("refused_rows", 0))
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(
            f"{path} does not match the run's settings ({one_line(error)}): it is from another run or version of "
            "thermopile; resume it with the version that started it"
        ) from error


def newest(config: TrainConfig, run: RunDirectory, world: World, before: Place | None = None) -> Loaded | None:
    """Return the newest intact checkpoint as `load_latest` does, which only rank 0 reads. Called by all ranks.

    Raises RunError, ConfigError as `changes_since` and `refuse_other_order`, too.
    """
    ranks, about, tensors = world.slow_group, None, dict[str, Tensor]()
    with agreement(ranks, RunError):
        if world.is_first and (found := load_latest(run.checkpoints, before=before)):
            tensors, rest = take_apart(found.training)
            kinds = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
            about = found.path.name, found.newest.name, found.info, kinds, rest
    if (about := ranks.broadcast(about)) is None:
        return None
    name, newest, info, kinds, rest = about
    if not world.is_first:
        tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in kinds.items()}
    ranks.copy_from_first(tensors.values())
    with agreement(world.control, RunError):
        changes_since(run.checkpoints / name, info.settings, config)
        refuse_other_order(run.checkpoints / name, info)
    return Loaded(run.checkpoints / name, info, join(tensors, rest), run.checkpoints / newest)


def warn_of_changes(config: TrainConfig, start: Loaded, steps_per_epoch: int) -> None:
    """Warn of settings changed since the checkpoint `start` was made, and of a jump of the learning rate."""
    if changes := changes_since(start.path, start.info.settings, config):
        jump = rate_jump(settings_at(start.path, start.info.settings), config, start.info.step, steps_per_epoch)
        changed = "; ".join([*(change.arrow for change in changes), *jump])
        _log.warning("the settings have changed since %s: %s", start.path, changed)


def refuse_other_order(checkpoint: Place, info: CheckpointInfo) -> None:
    """Raise RunError if a checkpoint's samples came in another order than this version's."""
    if info.order_version != ORDER_VERSION:
        raise RunError(
            f"{checkpoint} was made with sample order {info.order_version}, but this version uses order "
            f"{ORDER_VERSION}; go on with the version that started it"
        )


def refuse_differences(world: World, own: dict[str, Any]) -> None:
    """Raise ConfigError on every rank, naming rank and setting, if the ranks' `facts` differ. Called by all ranks."""
    if found := differences(world.control.broadcast(world.control.gather(own))):
        more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise ConfigError(
            f"the ranks differ: {'; '.join(found[:MAX_NAMED])}{more}. "
            "Start them all with the same settings, the same dataset and the same thermopile"
        )


def facts(config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """Return everything that must be equal on all ranks, by name; small and picklable. config: resolved."""
    scored_on = {"evaluation.test": config.evaluation.test, "evaluation.train": config.evaluation.train}
    return {
        "thermopile": __version__,
        "order_version": ORDER_VERSION,
        "dataset fingerprint": dataset.index.fingerprint,
        "dataset samples": dataset.n,
        **{f"{key} fingerprint": _fingerprint(key, path) for key, path in scored_on.items() if path},
        **{key: value for key, value in flat(to_tree(config)).items() if key not in MAY_DIFFER},
    }


def _fingerprint(key: str, path: str) -> str:
    try:
        return Dataset(path, pictures=False).index.fingerprint
    except DatasetError as error:
        why = str(error).removesuffix(".")
        raise DatasetError(f"{key}: {why}. If it was moved, pass its new path with --set {key}=DATASET") from error


def differences(of_ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Describe each difference from rank 0: rank, fact, both values."""
    first, *others = of_ranks
    texts = [
        (rank, key, *("none" if value is None else repr(value) for value in (own.get(key), first.get(key))))
        for rank, own in enumerate(others, start=1)
        for key in (first | own)
        if own.get(key) != first.get(key)
    ]
    return [f"rank {rank} has {key} = {value}, rank 0 {of_first}" for rank, key, value, of_first in texts]


def state_to_grow(config: TrainConfig, dataset: Dataset, objective: Objective) -> StateReader:
    """Return the state of `init.run`, the initial state of the dataset's first samples.

    Raises ConfigError unless the dataset is that run's, or grew from it by appending, and both keep the same fields;
    RunError and StateStoreError if the state cannot be read.
    """
    path, step = parts_of(config.init.run)
    run = RunDirectory(path)
    reader = StateReader.open(run.state, at=read_info(run.checkpoints / str(step)).snapshot)
    if reader.selection is not None or config.data.select or config.data.without or config.data.parts:
        raise ConfigError("--grow carries the state of all samples, which one of the runs does not have; leave it out")
    known = {**dataset.index.predecessors, dataset.index.fingerprint: dataset.n}
    if known.get(reader.dataset_fingerprint) != reader.samples:
        raise ConfigError(
            f"--grow: {dataset.place} did not grow from the dataset of {path}, which has other samples; "
            "append to that dataset (thermopile convert … --append), or leave out --grow"
        )
    if set(reader.fields) != set(objective.fields):
        raise ConfigError(
            f"--grow: {path} keeps {', '.join(reader.fields)} for each sample, but this run's objective "
            f"{', '.join(objective.fields) or 'nothing'}; use that run's objective"
        )
    return reader
