"""Fork a run: a new one that goes on from a checkpoint of it, or begins again at step 0, with some settings changed."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from ...pipeline.dataset import Dataset
from ...pipeline.mixture import open_dataset
from ...state_store import StateStoreError, history
from ...state_store.forking import fork_state, read_back
from ...state_store.shares import writer_lock
from ...storage.mixed_rows import MixedRows
from ...storage.place import Lock, Place
from ..checkpoints.checkpoint_files import (
    CheckpointInfo,
    checkpoints_in,
    fork_checkpoint,
    load_checkpoint,
    read_info,
)
from ..config import TrainConfig, to_tree
from ..config.layers import Layers
from ..config.own_code import announce_code, code_in, refuse_code
from ..errors import ConfigError, RunError, RunExistsError
from ..lineage import Origin, read_lineage
from ..metrics.metrics_file import copy_until
from ..optim import learning_rate
from ..run_directory import RunDirectory, find_checkpoint
from .build import create_order, objective_of, resolve
from .resume_settings import Change, as_recorded, differences, impossible, settings_at
from .selection_files import fork_selection

START = "step-0"
"""Where a run begins, which has no checkpoint."""
TYPED = "the command line"
_FORKABLE = ("data.weights",)
"""Settings that are fixed when a run is resumed, but not in a fork, which gets a copy of its own."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fork:
    """A fork that can be made."""

    origin: RunDirectory
    checkpoint: Place | None
    """None: it begins again at step 0."""
    info: CheckpointInfo | None
    recorded: TrainConfig
    """The origin's settings at that step, resolved."""
    config: TrainConfig
    dataset: Dataset
    changes: list[Change]
    changed_since: list[Change]
    """Settings of the origin that it has changed after that step, and the fork has not."""
    rates: tuple[float, float]
    """Learning rates of the next step, in the origin and in the fork."""
    total_steps: int
    """The fork's."""

    @property
    def step(self) -> int:
        return self.info.step if self.info else 0

    def is_there(self) -> bool:
        """Return whether the origin still has the checkpoint."""
        return self.checkpoint is None or self.checkpoint in checkpoints_in(self.origin.checkpoints).values()

    def origins(self) -> list[Origin]:
        """Return the runs that the fork comes from."""
        found = read_lineage(self.origin.lineage_file)
        changed = [change.arrow for change in self.changes]
        own = Origin(str(self.origin.path.resolve()), found.id if found else None, self.step, changed)
        return [*(found.origins if found else ()), own]


def plan_fork(origin: RunDirectory, at: str, given: Layers, *, allow_code: bool = False) -> Fork:
    """Return the fork of a run at `latest` or step-N with its settings at that step and the given changes.

    given: layers of the origin TYPED. allow_code: whether settings that only the run names may import code.
    Raises ConfigError for a change that no fork can make, RunError, DatasetError, StateStoreError, OSError.
    """
    now = origin.config_to_resume(accept_edits=False)
    begins = at == START and 0 not in checkpoints_in(origin.checkpoints)
    checkpoint = None if begins else find_checkpoint(origin, at)
    info, recorded = None, now
    if checkpoint is not None:
        info = read_info(checkpoint)
        recorded = _with_places(settings_at(checkpoint, info.settings), now)
    layers, place = Layers(), str(checkpoint or origin.config_file)
    layers.add(to_tree(recorded), place)
    layers.add(given.tree, TYPED)
    asked = layers.load()
    _refuse_code(recorded, asked, layers, place, allow_code=allow_code)
    dataset = open_dataset(asked.data.places, asked.data.tars)
    _refuse_other_dataset(origin, dataset)
    asked = as_recorded(asked, recorded)
    recorded, asked = resolve(recorded, dataset), resolve(asked, dataset)
    changes = differences(recorded, asked)
    if refused := [why for key, why in impossible(changes, recorded).items() if key not in _FORKABLE]:
        raise ConfigError(
            f"{origin.path} cannot be forked with other settings: {'; '.join(refused)}. Leave them out, or start a "
            f"new run: thermopile train --config {origin.config_file} …"
        )
    step, per_epoch = info.step if info else 0, create_order(asked, dataset, objective_of(asked)).steps_per_epoch
    totals = [config.total_steps(per_epoch) for config in (recorded, asked)]
    if totals[1] < step:
        raise ConfigError(
            f"these settings make {totals[1]:,} steps, but step-{step} is later; raise epochs or steps, or fork "
            f"{origin.path} at an earlier checkpoint"
        )
    before, after = (
        learning_rate(config.optimizer, step, per_epoch, total)
        for config, total in zip((recorded, asked), totals, strict=True)
    )
    since = [change for change in differences(recorded, resolve(as_recorded(now, recorded), dataset)) if info]
    return Fork(origin, checkpoint, info, recorded, asked, dataset, changes, since, (before, after), totals[1])


def plans(origin: RunDirectory, given: Layers, *, allow_code: bool = False) -> Iterator[Fork]:
    """Yield the fork at step 0, then that at each kept checkpoint. Raises as `plan_fork`."""
    for step in sorted({0, *checkpoints_in(origin.checkpoints)}):
        yield plan_fork(origin, f"step-{step}", given, allow_code=allow_code)


def make_fork(fork: Fork, into: RunDirectory) -> bool:
    """Make the run `into`, read all of it back, and give it its settings last, which make it a run.

    The origin may train meanwhile. Returns False if it has removed the checkpoint meanwhile: nothing is left then, nor
    after an error; a kill leaves no run. Raises RunExistsError, RunError, ConfigError, StateStoreError, OSError.
    """
    building = into.path.resolve().aside
    _refuse_taken(into, building)
    with ExitStack() as held:
        lock = writer_lock(building / "state")
        held.callback(lock.release)
        run = RunDirectory(building).under(lock)
        try:
            _remove_parts(run)
            with building.written_through():
                run.create(fork.config, lambda: _fill(fork, run, lock), fork.origins())
            if building != into.path:
                building.publish()
        except BaseException as error:
            _remove_parts(run)
            if building != into.path:
                building.clear()
            if isinstance(error, OSError | RunError | StateStoreError) and not fork.is_there():
                return False
            raise
    return True


def _with_places(recorded: TrainConfig, now: TrainConfig) -> TrainConfig:
    """Return a checkpoint's settings with the dataset where the run found it last."""
    places = {name: getattr(now.data, name) for name in ("path", "parts", "tars")}
    return recorded.model_copy(update={"data": recorded.data.model_copy(update=places)})


def _refuse_code(recorded: TrainConfig, asked: TrainConfig, layers: Layers, place: str, *, allow_code: bool) -> None:
    """Refuse code that the run names, which may come from someone else, and the command line does not."""
    named = code_in(asked)
    typed = {key: code for key, code in named.items() if layers.origins[key] == TYPED}
    for config in () if allow_code else (asked, recorded):
        refuse_code({key: code for key, code in code_in(config).items() if typed.get(key) != code}, place)
    announce_code(named)


def _refuse_other_dataset(origin: RunDirectory, dataset: Dataset) -> None:
    if not origin.has_state:
        return
    made_for = history.load(origin.state)[0].description.dataset_fingerprint
    if made_for in dataset.index.predecessors:
        raise ConfigError(
            f"{dataset.place} has grown since {origin.path} began, and a fork has its samples. For the new ones, start "
            f"a run with its weights and state: thermopile train --init-from {origin.path} --grow --data "
            f"{dataset.place} --out RUN"
        )
    if made_for != dataset.index.fingerprint:
        raise ConfigError(
            f"{dataset.place} is not the dataset of {origin.path}: its fingerprint is "
            f"{dataset.index.fingerprint[:12]}…, not {made_for[:12]}…; pass that dataset's place with --data"
        )


def _refuse_taken(into: RunDirectory, building: Place) -> None:
    is_leftover = building == into.path and into.lineage_file.is_present() and not into.exists()
    if not is_leftover:  # of a killed fork in a bucket
        into.refuse_existing()
    if into.path.is_taken(into.config_file.name):
        raise RunExistsError(f"{into.path} {into.path.occupied} with --out")


def _remove_parts(run: RunDirectory) -> None:
    """Remove what a fork writes before its settings."""
    for folder in (run.state, run.checkpoints, run.selection, run.path / "metrics"):
        folder.clear()
    run.metrics_file.unlink(missing_ok=True)


def _fill(fork: Fork, run: RunDirectory, lock: Lock) -> None:
    """Write everything but the settings, and read it back. Raises as `make_fork`."""
    origin, own, data = fork.origin, fork.recorded.data, fork.config.data
    if data.parts:
        MixedRows.read(origin.selection).write(run.selection)
    else:
        fork_selection(own, data, fork.dataset.index, origin.selection, run.selection)
    if fork.checkpoint is None or fork.info is None:
        return
    fork_state(origin.state, run.state, fork.info.snapshot, lock.writer)
    fork_checkpoint(fork.checkpoint, fork.info, to_tree(fork.config), run.checkpoints)
    with suppress(FileNotFoundError):  # deleted by hand, as it may be
        copy_until(origin.metrics, run.metrics_file, fork.step)
        run.metrics.put()
    read_back(run.state)
    load_checkpoint(run.checkpoints / f"step-{fork.step}")
