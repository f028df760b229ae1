"""The status of a run, live or finished, read without torch and without changing its files."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...state_store.errors import StateStoreError
from ...storage.place import Log, Place, lock_status
from ..checkpoints.checkpoint_files import INFO, checkpoints_in
from ..config import FROZEN, DataConfig, TrainConfig
from ..metrics.metrics_file import last_lines, loss_curve
from ..metrics.step_report import RECENT_STEPS, TIME, collapse, hints, split
from ..run_directory import Lineage, RunDirectory, read_lineage

if TYPE_CHECKING:
    from ...state_store.reader import StateReader
    from ...storage.selection import Selection

CURVE_POINTS = 60
EVALUATIONS, WARNINGS = 10, 5
"""Number of latest evaluations and warnings to read."""
SILENT_SECONDS = 600.0
"""A run quiet for this long, and for ten times its usual interval between writes, may be hung."""
COVERAGE_BLOCKS = 16
"""Evenly spaced blocks of the state from which the share of visited samples is estimated."""

_WARNING_BYTES = 1 << 14


@dataclass(frozen=True)
class StepsStatus:
    """Content of metrics.jsonl; None for missing values, as in runs of older versions."""

    step: int
    """Steps written so far."""
    epoch: int
    """Epoch of the last step, from 0."""
    age_seconds: float
    """Time since metrics.jsonl was last written."""
    loss: float | None
    loss_mean: float | None
    """Mean over the last RECENT_STEPS, as are `step_seconds`, `split`, `hints` and `skipped`."""
    loss_curve: list[float]
    """From the first step to the last, at most CURVE_POINTS."""
    tau_mean: float | None
    """Mean temperature of the last batch over its sides, or the global one."""
    learning_rate: float | None
    refused_rows: int | None
    skipped: int
    step_seconds: float | None
    split: dict[str, float]
    """Shares of the time; see step_report.split."""
    hints: list[str]
    collapse: str
    """How the features have collapsed, and likely causes; empty if they have not."""


@dataclass(frozen=True)
class StateStatus:
    samples: int
    """Samples of the run's order, with holes."""
    kept: int
    """Samples that it trains on, without holes: as `inspect` counts them."""
    dataset_samples: int
    """All samples of its dataset; more than `samples` if the run selects some."""
    snapshots: list[str]
    """Tags, oldest first."""
    coverage: float
    """Share of them, without holes, visited at the last snapshot."""
    is_estimated: bool
    """Whether that is by COVERAGE_BLOCKS blocks alone."""
    parts: dict[str, int]
    """Samples of the parts of a mixture, by name."""


@dataclass(frozen=True)
class CheckpointStatus:
    step: int
    age_seconds: float
    bytes: int
    """Size of its own files, excluding the snapshot."""


@dataclass(frozen=True)
class RunStatus:
    run: str
    lineage: Lineage | None
    """Its id and origins; None of an earlier version's run."""
    state: str
    """running; silent (a process holds the lock but has been quiet); stopped; finished; never started."""
    writer: str | None
    """`pid N on HOST`: the training process, or, if stopped, the killed process."""
    epochs: int
    batch_size: int
    total_steps: int | None
    """None if the state, which knows the number of samples, cannot be read."""
    samples_per_second: float | None
    """Places of batches, with holes."""
    seconds_left: float | None
    """Only while running."""
    steps: StepsStatus | None
    """None before the first line."""
    checkpoints: list[CheckpointStatus]
    """By step; --resume uses the last."""
    sample_state: StateStatus | None
    evaluations: list[dict[str, Any]]
    """The last evaluations in metrics.jsonl, oldest first: `step`, and `evaluation` by name."""
    warnings: list[str]
    """The last lines of warnings.log."""
    notes: list[str]
    """Files that could not be read, and the reasons."""


def read_status(run: RunDirectory) -> RunStatus:
    """Read a run's status, in time independent of its length. Raises RunError if the directory is not a run."""
    config, notes = run.config(), list[str]()
    steps, evaluations = _read_metrics(run, config, notes)
    sample_state = _read_state(run, config.data, notes)
    total = _total_steps(config, sample_state, notes)
    checkpoints = []
    for step, path in sorted(checkpoints_in(run.checkpoints).items()):
        with suppress(OSError):  # the run may be removing old ones
            written = path / INFO if path.is_remote else path  # objects alone have times in a bucket
            checkpoints.append(CheckpointStatus(step, _age(written), path.size_below()))
    writer, silence = _writer(run, notes)
    seconds = steps.step_seconds if steps else None
    return RunStatus(
        run=str(run.path),
        lineage=read_lineage(run.lineage_file),
        state=_state(run, config, steps, checkpoints, total, silence),
        writer=writer,
        epochs=config.epochs,
        batch_size=config.batch_size,
        total_steps=total,
        samples_per_second=config.batch_size / seconds if seconds else None,
        seconds_left=(total - steps.step) * seconds if silence is not None and steps and total and seconds else None,
        steps=steps,
        checkpoints=checkpoints,
        sample_state=sample_state,
        evaluations=evaluations,
        warnings=_last_warnings(run, notes),
        notes=notes,
    )


def _writer(run: RunDirectory, notes: list[str]) -> tuple[str | None, float | None]:
    """Return the process that the lock names and, if it holds the lock, the seconds since its last write."""
    try:
        lock = lock_status(run.state_lock)
    except OSError as error:
        notes.append(f"the lock cannot be read: {error}")
        return None, None
    if not lock.is_held:
        return lock.holder, None
    try:
        silence = _age(run.metrics)
    except OSError:
        return lock.holder, lock.age
    return lock.holder, silence if lock.is_renewed else min(silence, lock.age)


def _state(
    run: RunDirectory,
    config: TrainConfig,
    steps: StepsStatus | None,
    checkpoints: Sequence[CheckpointStatus],
    total: int | None,
    silence: float | None,
) -> str:
    """silence: seconds since the run's last write; None without a process."""
    if silence is not None:
        every_steps = config.log_every  # between writes of lines, or in a bucket of a part of them at each checkpoint
        if run.metrics.is_late and checkpoints:
            every_steps = checkpoints[-1].step - (checkpoints[-2].step if len(checkpoints) > 1 else 0)
        between_writings = every_steps * (steps.step_seconds or 0.0) if steps else 0.0
        return "silent" if silence > max(SILENT_SECONDS, 10 * between_writings) else "running"
    if checkpoints and checkpoints[-1].step == total:
        return "finished"
    return "stopped" if steps or checkpoints else "never started"


def _read_metrics(
    run: RunDirectory, config: TrainConfig, notes: list[str]
) -> tuple[StepsStatus | None, list[dict[str, Any]]]:
    try:
        lines, evaluations, damaged = last_lines(run.metrics, RECENT_STEPS, EVALUATIONS)
        curve, age = loss_curve(run.metrics, CURVE_POINTS), _age(run.metrics)
    except FileNotFoundError:
        return None, []
    except OSError as error:
        notes.append(f"the steps cannot be read: {error}")
        return None, []
    if damaged:
        notes.append(f"{damaged:,} of the last lines of {run.metrics_file} cannot be read; a resume sets them aside")
    if not lines:
        return None, evaluations
    last = lines[-1]
    taus = [name for name in last if name == "tau" or name.endswith("/tau_mean")]
    refused = _number(last, "refused_rows")
    return StepsStatus(
        step=last["step"],
        epoch=int(_number(last, "epoch") or 0),
        age_seconds=age,
        loss=_number(last, "loss"),
        loss_mean=_mean(_number(line, "loss") for line in lines),
        loss_curve=curve,
        tau_mean=_mean(_number(last, name) for name in taus),
        learning_rate=_number(last, "learning_rate"),
        refused_rows=None if refused is None else int(refused),
        skipped=sum(line.get("skipped") is True for line in lines),
        step_seconds=_mean(_number(line, TIME) for line in lines),
        split=split(lines),
        hints=list(hints(lines, config.objective.settings).values()),
        collapse=collapse(lines, config),
    ), evaluations


def _age(file: Place | Log) -> float:
    return max(0.0, time.time() - file.modified())  # another machine's clock may be ahead


def _number(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    return value if isinstance(value, float) else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _read_state(run: RunDirectory, data: DataConfig, notes: list[str]) -> StateStatus | None:
    if not run.has_state:
        return None  # not created yet
    from icechunk import IcechunkError

    from ...pipeline.opening import part_names
    from ...state_store.durable import Repository
    from ...state_store.history import Snapshot
    from ...state_store.reader import StateReader, selection_of
    from ...storage.mixed_rows import MixedRows

    try:
        repository = Repository(run.state)
        history = repository.history()
        snapshots = [entry for entry in history if isinstance(entry, Snapshot)]
        notes += [str(entry) for entry in history if not isinstance(entry, Snapshot)]
        snapshot, selection = snapshots[-1] if snapshots else repository.resolve("latest"), selection_of(repository)
        mixture = selection if isinstance(selection, MixedRows) else None
        reader = StateReader(repository, snapshot, mixture)
        coverage, is_estimated = _coverage(reader, selection)
        kept = StateReader(repository, snapshot, selection).kept
        samples = kept + (selection.about.holes or 0 if selection else 0)
        tags = [snapshot.tag for snapshot in snapshots]
        parts = dict(zip(part_names(data.parts or ()), mixture.samples if mixture else (), strict=False))
        of_all = selection.about.samples if selection else kept
        return StateStatus(samples, kept, of_all, tags, coverage, is_estimated, parts)
    except (StateStoreError, IcechunkError, OSError) as error:
        notes.append(f"the samples' state cannot be read: {error}")
        return None


def _coverage(reader: StateReader, selection: Selection | None) -> tuple[float, bool]:
    """Return the share of samples visited, and whether it is estimated."""
    blocks = -(-reader.samples // reader.block_rows)
    looked_at = min(blocks, COVERAGE_BLOCKS)
    visited = rows = 0
    for place in range(looked_at):
        start = place * blocks // looked_at * reader.block_rows
        visits = reader.rows(start, min(start + reader.block_rows, reader.samples), ["visits"])["visits"]
        if selection is not None:
            visits = visits[selection.are_present(range(start, start + len(visits)))]
        visited, rows = visited + int((visits > 0).sum()), rows + len(visits)
    return visited / max(rows, 1), looked_at < blocks


def _total_steps(config: TrainConfig, state: StateStatus | None, notes: list[str]) -> int | None:
    from ...pipeline.order.mixed_order import MixedOrder
    from ...pipeline.order.order import Order

    if state is None:
        return None
    try:
        cut = {name: number or None for name, number in config.order}
        order = Order.create(state.samples, config.batch_size, config.seed, **cut)
        if state.parts and config.data.shares:
            order = MixedOrder.of(order, [*state.parts.values()], config.data.shares)
        order = order.serving_all() if config.objective.name == FROZEN else order
    except ValueError as error:
        notes.append(f"the number of steps is unknown: {error}")
        return None
    return config.total_steps(order.steps_per_epoch)


def _last_warnings(run: RunDirectory, notes: list[str]) -> list[str]:
    try:
        file = run.warnings.opened()
        text = file.read(max(0, file.size - _WARNING_BYTES), _WARNING_BYTES)
        lines = text.decode(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"the warnings cannot be read: {error}")
        return []
    return [line for line in lines if line][-WARNINGS:]
