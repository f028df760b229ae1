"""Fork a run: a new one that goes on from a checkpoint of it, or begins again at step 0, with some settings changed."""

import logging
from contextlib import ExitStack, suppress
from functools import partial
from shlex import quote
from typing import NamedTuple

import numpy as np

from ...pipeline.opening import Dataset
from ...state_store import history
from ...state_store.errors import DAMAGE, SnapshotError, StateStoreError, StoreLockedError
from ...state_store.forking import fork_state
from ...state_store.store import writer_lock
from ...storage.arrays import Int64s
from ...storage.lock import LockedError
from ...storage.mixed_rows import MixedRows
from ...storage.place import Lock, Place
from ...storage.selection import Selection
from ..checkpoints import checkpoint_files
from ..config import TrainConfig, load_config, to_tree
from ..config.layers import Layers
from ..errors import ConfigError, DamagedCheckpointError, RunError, RunExistsError, refusing
from ..metrics.metrics_file import copy_until
from ..optim import rate_jump
from ..plugins import code_in
from ..run_directory import Origin, RunDirectory, find_checkpoint, read_lineage
from .build import pieces_per_step
from .own_dataset import keep_facts, open_own
from .restoring import refuse_other_order, refuse_published
from .resume_settings import Change, differences, impossible, settings_at, with_free
from .selection_files import check_own_copy, holes_in, selects, unchanged, write_selection
from .starting import complete, merge, refuse_code_of_files

_log = logging.getLogger(__name__)


class Fork(NamedTuple):
    """A fork that can be made. recorded: the origin's settings at that step, resolved like the fork's own."""

    origin: RunDirectory
    checkpoint: tuple[Place, checkpoint_files.CheckpointInfo] | None
    """None: the fork begins again at step 0."""
    recorded: TrainConfig
    config: TrainConfig
    dataset: Dataset
    changes: list[Change]
    total_steps: int
    jump: list[str]
    """How far the learning rate of the next step is from the origin's; as `rate_jump`."""
    holes: Int64s
    """Positions of the samples that it leaves out, ascending, int64."""
    forgotten: int
    """How many of them the origin does not leave out."""
    used: int
    """How many of these the origin had used before that step."""

    @property
    def step(self) -> int:
        return self.checkpoint[1].step if self.checkpoint else 0


def plan_fork(origin: RunDirectory, at: str | None, given: Layers) -> Fork:
    """Return the fork of a run at `latest` or step-N, with its settings of then and the given changes; writes nothing.

    at: None: the latest checkpoint, or with samples to forget the latest that has not seen them; or else step 0.
    Raises ConfigError for a change that no fork can make, and for code that only the run names; RunError, DatasetError,
    StateStoreError, OSError.
    """
    recorded = now = origin.config(edited="refuse")
    checkpoint, step = None, 0
    kept = checkpoint_files.checkpoints_in(origin.checkpoints)
    if (at or kept) and (at != "step-0" or 0 in kept):
        file = find_checkpoint(origin, at or checkpoint_files.LATEST)
        info = checkpoint_files.read_info(file)
        refuse_other_order(file, info)
        checkpoint, step = (file, info), info.step
        recorded = with_free(settings_at(file, info.settings), now)
    later = "; ".join(change.arrow for change in differences(recorded, now))
    layers = merge(recorded, given, origin.path)
    asked = load_config(layers.tree)
    refuse_code_of_files(code_in(asked), code_in(recorded), layers.origins, given.origins.values())
    dataset = open_own(origin, asked.data.places, asked.data.tars, same=True)
    made_for = history.load(origin.state)[0].description.dataset_fingerprint if origin.has_state else None
    if made_for not in (None, dataset.index.fingerprint):  # also where the run's facts of its dataset are lost
        raise ConfigError(f"{dataset.place} is not the dataset of {origin.path}; pass that one's place with --data")
    (recorded, _), (asked, parts) = (complete(each, dataset, recorded=recorded) for each in (recorded, asked))
    changes = differences(recorded, asked)
    may_change = {"data.weights", *(["data.without"] if asked.data.without else [])}  # holes are only added
    may_change |= set() if asked.data.planted else {"data.planted"}
    if refused := [why for key, why in impossible(changes, recorded).items() if key not in may_change]:
        raise ConfigError(
            f"{origin.path} cannot be forked with other settings: {'; '.join(refused)}. Leave them out, or start a "
            f"new run: thermopile train --config {quote(str(origin.config_file))} …"
        )
    assert parts is not None
    order, used, per_epoch = parts.order, 0, parts.order.steps_per_epoch
    after = asked.total_steps(per_epoch)
    holes, new = _holes(origin, recorded, asked, dataset)
    if len(new):
        first = order.first_uses(new, asked.epochs)
        first *= not recorded.data.planted  # else their captions may have been shown with other pictures
        unaware = max(each for each in {0, *kept} if each <= first.min())
        if at is None and unaware < step:
            return plan_fork(origin, f"step-{unaware}", given)
        used = int((first < step).sum())
        with refusing("data.without", ValueError):
            order.refuse_thin_steps(holes, step, after, pieces_per_step(asked.batch_size, asked.micro_batch))
    if later:
        _log.warning("%s has changed since step-%d; a fork has the settings of that step: %s", origin.path, step, later)
    if after < step:
        raise ConfigError(f"step-{step} is after the end of these settings, {after:,} steps; set more epochs or steps")
    if checkpoint is None:
        refuse_published(asked, origin)
    jump = rate_jump(recorded, asked, step, per_epoch)
    return Fork(origin, checkpoint, recorded, asked, dataset, changes, after, jump, holes, len(new), used)


def _holes(origin: RunDirectory, recorded: TrainConfig, asked: TrainConfig, dataset: Dataset) -> tuple[Int64s, Int64s]:
    """Return the positions of the samples that a fork leaves out, ascending, and of those that its origin does not.

    Raises ConfigError unless its file names all, those of the origin's, too: settings name one file to start again by.
    """
    own, file = Selection(origin.selection), asked.data.without
    before = np.empty(0, np.int64) if not recorded.data.without or own.without is None else own.without
    if file in ("", recorded.data.without):
        return before, before[:0]
    holes = holes_in(unchanged(file, "without"), own.ids if recorded.data.select else None, dataset)
    if lacking := len(np.setdiff1d(before, holes)):
        raise ConfigError(
            f"--without {file.rpartition('@')[0]} lacks {lacking:,} samples that {origin.path} has forgotten; name all "
            f"of them, also those of {recorded.data.without.rpartition('@')[0]}, in one file"
        )
    return holes, np.setdiff1d(holes, before)


def fork_run(origin: RunDirectory, at: str | None, given: Layers, into: RunDirectory) -> Fork:
    """Fork a run, which may train meanwhile, as `plan_fork` says; if it removes a checkpoint meanwhile, start over.

    Links are to files that are written once. Changed in place are metrics.jsonl, metrics.damaged.jsonl, warnings.log,
    state.lock and state.working/, of which metrics.jsonl alone is copied; all others are replaced by a rename.
    Everything is read back before the settings are written, without which `into` is no run. What a killed fork leaves,
    and in a bucket one that failed, is removed when it is repeated. Raises RunExistsError, and as `plan_fork`.
    """
    while True:
        seen = checkpoint_files.checkpoints_in(origin.checkpoints)
        try:
            fork = plan_fork(origin, at, given)
            _make(fork, into)
            return fork
        except (OSError, RunError, StateStoreError):
            if not (gone := {*seen.values()} - {*checkpoint_files.checkpoints_in(origin.checkpoints).values()}):
                raise
            _log.warning("%s has removed %s; starting over", origin.path, ", ".join(sorted(path.name for path in gone)))


def _make(fork: Fork, into: RunDirectory) -> None:
    known, place = read_lineage(fork.origin.lineage_file), str(fork.origin.path.resolve())
    changed = [change.arrow for change in fork.changes]
    origin = Origin(run=place, id=known.id if known else None, step=fork.step, changed=changed)
    left = read_lineage(into.lineage_file) if into.path.is_remote and not into.exists() else None
    last = left.origins[-1] if left and left.origins else None
    is_left = last and last.run == place and {*checkpoint_files.checkpoints_in(into.checkpoints)} <= {last.step}
    if not is_left:  # by a killed fork
        into.refuse_existing()
    try:
        with into.path.resolve().built() as building, ExitStack() as end:
            lock = writer_lock(building / "state")
            end.callback(lock.release)
            if into.path.is_taken(into.config_file.name):  # again, under the lock
                raise RunExistsError(f"{into.path} {into.path.occupied} with --out")
            run = RunDirectory(building).under(lock)
            for folder in (run.state, run.checkpoints, run.selection, run.path / "metrics"):
                folder.clear()
            with building.written_through():
                run.create(fork.config, partial(_fill, fork, run, lock), [*(known.origins if known else ()), origin])
    except (LockedError, StoreLockedError):
        raise into.taken() from None


def _fill(fork: Fork, run: RunDirectory, lock: Lock) -> None:
    """Write everything but the settings, and read it back."""
    origin, own = fork.origin, fork.recorded.data
    keep_facts(run, fork.dataset)
    if own.parts:
        MixedRows.read(origin.selection).write(run.selection)
    elif selects(fork.config.data):
        of = (own, Selection(origin.selection), fork.holes) if selects(own) else None
        if of is not None:
            check_own_copy(*of[:2])
        write_selection(fork.config.data, fork.dataset, run.selection, of)
    if fork.checkpoint is None:
        return
    path, info = fork.checkpoint
    try:
        fork_state(origin.state, run.state, info.snapshot, lock.writer)
        made = checkpoint_files.fork_checkpoint(path, info, to_tree(fork.config), run.checkpoints)
        checkpoint_files.load_checkpoint(made)
    except (DamagedCheckpointError, SnapshotError, *DAMAGE) as error:  # in files of the origin, by its own names
        reason = str(error).replace(str(run.path), str(origin.path))
        raise RunError(f"{origin.path} cannot be forked at step-{info.step}: {reason}") from error
    with suppress(FileNotFoundError):  # deleted by hand
        copy_until(origin.metrics, run.metrics_file, info.step)
        run.metrics.put()
