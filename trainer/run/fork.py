"""Fork a run: a new one that goes on from a checkpoint of it, or begins again at step 0, with some settings changed."""

import logging
from contextlib import ExitStack, suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...pipeline.dataset import Dataset
from ...pipeline.mixture import open_dataset
from ...state_store import StateStoreError, StoreLockedError, history
from ...state_store.forking import fork_state
from ...state_store.shares import writer_lock
from ...storage.lock import LockedError
from ...storage.mixed_rows import MixedRows
from ...storage.place import Lock, Place
from ...storage.selection import Selection
from ..checkpoints.checkpoint_files import (
    LATEST,
    CheckpointInfo,
    checkpoints_in,
    fork_checkpoint,
    load_checkpoint,
    read_info,
)
from ..config import TrainConfig, to_tree
from ..config.layers import Layers
from ..errors import ConfigError, RunError, RunExistsError
from ..lineage import Origin, read_lineage
from ..metrics.metrics_file import copy_until
from ..optim import learning_rate
from ..run_directory import RunDirectory, find_checkpoint
from ..world import ALONE
from .build import create_order, objective_of, pieces_per_step, refuse_thin_steps, resolve
from .restoring import refuse_published
from .resume_settings import Change, as_recorded, differences, impossible, settings_at, with_changes
from .selection_files import SELECTING, check_own_copy, holes_in, pinned, unchanged, write_selection

_log = logging.getLogger(__name__)


class Fork(NamedTuple):
    """A fork that can be made. recorded: the origin's settings at that step, resolved like the fork's own."""

    origin: RunDirectory
    checkpoint: tuple[Place, CheckpointInfo] | None
    """None: the fork begins again at step 0."""
    recorded: TrainConfig
    config: TrainConfig
    dataset: Dataset
    changes: list[Change]
    total_steps: int
    rates: tuple[float, float]
    """Learning rates of the next step, in the origin and in the fork."""
    forgotten: int
    """Samples that it is to forget, besides those that the origin had forgotten."""
    used: int
    """How many of them the origin had used before that step."""

    @property
    def step(self) -> int:
        return self.checkpoint[1].step if self.checkpoint else 0


def plan_fork(origin: RunDirectory, at: str | None, given: Layers) -> Fork:
    """Return the fork of a run at `latest` or step-N, with its settings of then and the given changes; writes nothing.

    at: None: the latest checkpoint, or with samples to forget the latest that has not seen them, which may be step 0.
    Raises ConfigError for a change that no fork can make, and for code that only the run names; RunError, DatasetError,
    StateStoreError, OSError.
    """
    recorded = now = origin.config_to_resume(accept_edits=False)
    checkpoint, file, step = None, origin.config_file, 0
    at = at or _last_unaware(origin, now, with_changes(now, given, file))
    if at != "step-0" or 0 in checkpoints_in(origin.checkpoints):
        file = find_checkpoint(origin, at)
        info = read_info(file)
        checkpoint, recorded, step = (file, info), settings_at(file, info.settings), info.step
        places = {name: getattr(now.data, name) for name in ("path", "parts", "tars")}  # it may have been moved since
        recorded = recorded.model_copy(update={"data": recorded.data.model_copy(update=places)})
    if later := "; ".join(change.arrow for change in differences(recorded, now)):
        _log.warning("%s has changed since step-%d, and a fork does so only if told to: %s", origin.path, step, later)
    asked = with_changes(recorded, given, file)
    dataset = open_dataset(asked.data.places, asked.data.tars)
    _refuse_other_dataset(origin, dataset)
    recorded, asked = (resolve(as_recorded(each, recorded), dataset) for each in (recorded, asked))
    changes = differences(recorded, asked)
    may_change = {"data.weights", *(["data.without"] if asked.data.without else [])}  # holes are only added
    if refused := [why for key, why in impossible(changes, recorded).items() if key not in may_change]:
        raise ConfigError(
            f"{origin.path} cannot be forked with other settings: {'; '.join(refused)}. Leave them out, or start a "
            f"new run: thermopile train --config {origin.config_file} …"
        )
    order = create_order(asked, dataset, objective_of(asked))
    per_epoch = order.steps_per_epoch
    before, after = recorded.total_steps(per_epoch), asked.total_steps(per_epoch)
    if after < step:
        raise ConfigError(f"step-{step} is after the end of these settings, {after:,} steps; set more epochs or steps")
    if checkpoint is None:
        refuse_published(asked, origin)
    rates = [learning_rate(each.optimizer, step, per_epoch, end) for each, end in ((recorded, before), (asked, after))]
    new = _new_holes(origin, recorded, asked, dataset)
    if len(new):
        old = Selection(origin.selection).without if recorded.data.without else None
        holes = new if old is None else np.union1d(old, new)
        refuse_thin_steps(order, holes, step, after, pieces_per_step(asked, ALONE))
    used = int((order.first_uses(new, asked.epochs) < step).sum()) if len(new) else 0
    return Fork(origin, checkpoint, recorded, asked, dataset, changes, after, (rates[0], rates[1]), len(new), used)


def _last_unaware(origin: RunDirectory, now: TrainConfig, asked: TrainConfig) -> str:
    """Return the latest checkpoint before the samples to forget were first used; if there are none, the latest."""
    dataset = open_dataset(asked.data.places, asked.data.tars)
    new = _new_holes(origin, now, asked, dataset)
    if not len(new):
        return LATEST
    first = create_order(now, dataset, objective_of(now)).first_uses(new, now.epochs).min()
    return f"step-{max(step for step in {0, *checkpoints_in(origin.checkpoints)} if step <= first)}"


def _new_holes(origin: RunDirectory, recorded: TrainConfig, asked: TrainConfig, dataset: Dataset) -> NDArray[np.int64]:
    """Return the positions of the samples that a fork leaves out and its origin does not, ascending, int64 [m]."""
    pinned_file = pinned(asked.data.without, "without")
    if pinned_file in ("", recorded.data.without):
        return np.empty(0, np.int64)
    own = Selection(origin.selection)
    ids, before = (own.ids if recorded.data.select else None), (own.without if recorded.data.without else None)
    named = holes_in(unchanged(pinned_file, "without"), ids, dataset.index)
    return named if before is None else np.setdiff1d(named, before)


def fork_run(origin: RunDirectory, at: str | None, given: Layers, into: RunDirectory) -> Fork:
    """Fork a run, which may train meanwhile, as `plan_fork` says; if it removes the checkpoint meanwhile, start over.

    Links are to files that are written once. Changed in place are metrics.jsonl, metrics.damaged.jsonl, warnings.log,
    state.lock and state.working/, of which metrics.jsonl alone is copied; all others are replaced by a rename.
    Everything is read back before the settings are written, without which `into` is no run. What a killed fork leaves,
    and in a bucket one that failed, is removed when it is repeated. Raises RunExistsError, and as `plan_fork`.
    """
    while True:
        fork = plan_fork(origin, at, given)
        try:
            _make(fork, into)
            return fork
        except (OSError, RunError, StateStoreError):
            if fork.checkpoint is None or fork.checkpoint[0] in checkpoints_in(origin.checkpoints).values():
                raise
            _log.warning("%s has removed step-%d, which was being forked; starting over", origin.path, fork.step)


def _refuse_other_dataset(origin: RunDirectory, dataset: Dataset) -> None:
    made_for = history.load(origin.state)[0].description.dataset_fingerprint if origin.has_state else None
    if made_for in dataset.index.predecessors:
        raise ConfigError(
            f"{dataset.place} has grown since {origin.path} began, and a fork has the samples of then. To add the new "
            f"ones: thermopile train --init-from {origin.path} --grow --data {dataset.place} --out RUN"
        )
    if made_for not in (None, dataset.index.fingerprint):
        raise ConfigError(f"{dataset.place} is not the dataset of {origin.path}; pass that one's place with --data")


def _make(fork: Fork, into: RunDirectory) -> None:
    known = read_lineage(fork.origin.lineage_file)
    changed = [change.arrow for change in fork.changes]
    origin = Origin(str(fork.origin.path.resolve()), known.id if known else None, fork.step, changed)
    if not (into.path.is_remote and _is_left_of(origin, into)):
        into.refuse_existing()
    with ExitStack() as held:
        try:
            building = held.enter_context(into.path.resolve().built())
            lock = writer_lock(building / "state")
        except (LockedError, StoreLockedError):
            raise into.taken() from None
        held.callback(lock.release)
        if into.path.is_taken(into.config_file.name):  # under the lock
            raise RunExistsError(f"{into.path} {into.path.occupied} with --out")
        run = RunDirectory(building).under(lock)
        for folder in (run.state, run.checkpoints, run.selection, run.path / "metrics"):
            folder.clear()
        with building.written_through():
            run.create(fork.config, lambda: _fill(fork, run, lock), [*(known.origins if known else ()), origin])


def _is_left_of(origin: Origin, into: RunDirectory) -> bool:
    """Return whether all that is there is what a killed fork of a run has left: at most the checkpoint of its step."""
    left = None if into.exists() else read_lineage(into.lineage_file)
    last = left.origins[-1] if left is not None and left.origins else None
    return last is not None and last.run == origin.run and {*checkpoints_in(into.checkpoints)} <= {last.step}


def _fill(fork: Fork, run: RunDirectory, lock: Lock) -> None:
    """Write everything but the settings, and read it back."""
    origin, own = fork.origin, fork.recorded.data
    if own.parts:
        MixedRows.read(origin.selection).write(run.selection)
    elif any(getattr(data, option) for data in (own, fork.config.data) for option in SELECTING):
        of = (own, Selection(origin.selection)) if any(getattr(own, option) for option in SELECTING) else None
        if of is not None:
            check_own_copy(*of)
        write_selection(fork.config.data, fork.dataset.index, run.selection, of)
    if fork.checkpoint is None:
        return
    path, info = fork.checkpoint
    fork_state(origin.state, run.state, info.snapshot, lock.writer)
    load_checkpoint(fork_checkpoint(path, info, to_tree(fork.config), run.checkpoints))
    with suppress(FileNotFoundError):  # deleted by hand
        copy_until(origin.metrics, run.metrics_file, info.step)
        run.metrics.put()
