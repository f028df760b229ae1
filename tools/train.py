"""`thermopile train`: start or resume a run. torch is imported last."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import click

from ..state_store.ranks import agreement
from ..storage.files import open_own
from ..storage.place import AnyPlace, Places, place_of, places_of
from ..trainer.config import FROZEN
from ..trainer.config.layers import Layers, preset_names, read_toml
from ..trainer.errors import ConfigError, RanksLostError, RunError
from ..trainer.metrics.step_report import percent
from ..trainer.run_directory import RunDirectory
from ..trainer.world import World, joined_world
from .arguments import DATASET
from .eval import LABELS
from .printing import MAX_ERROR_CHARACTERS, plain_text, print_facts
from .progress import ProgressBar, duration, in_units, progress_bar, task_bars, working
from .train_options import COMMAND_LINE, OPTIONS, TrainCommand, TrainOptions, add_typed

if TYPE_CHECKING:
    from ..trainer.metrics.step_report import StepReport
    from ..trainer.run.run import Run
    from ..trainer.run.starting import Start
    from .inspection.opened_run import OpenedRun

    OnReport = Callable[[StepReport], None]

SHOWN = {
    "data_wait": "data wait",
    "fetch_wait": "fetch wait",
    "store_wait": "store wait",
    "write_backlog": "backlog",
    "forward_backward": "fwd+bwd",
    "optimizer": "optim",
    "communication": "comm",
    "other": "other",
}
"""Part of a step -> its name in the progress line."""
_ending = threading.Lock()

_log, _PACKAGE = logging.getLogger(__name__), logging.getLogger(__name__.partition(".")[0])


@click.command(
    cls=TrainCommand,
    params=OPTIONS,
    epilog="\b\nExamples:\n"
    "  thermopile train --preset glyphs --data data/glyphs --out runs/glyphs\n"
    "  thermopile train --data data/cc3m --out runs/cc3m --set epochs=30 --set optimizer.lr=2e-4\n"
    "  thermopile train --preset isogclr/cc3m --data data/cc3m --print-config\n"
    "  thermopile train --out runs/cc3m --resume\n"
    "  thermopile train --out runs/cc3m --resume --set epochs=40 --allow-change epochs\n"
    "  thermopile train --data data/own --out runs/own --config runs/cc3m/config.toml --init-from runs/cc3m",
)
def command(**options: Any) -> None:
    """Train encoders with a temperature per sample.

    Later settings override earlier ones: defaults, --preset, --config, --set, --steps, --init-from, --on-nan, --data,
    --tars, --select, --weights, --without. OUT/config.toml records the result.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 finish the current step, write a checkpoint and exit with code 75; before the
    first step they exit at once. A second signal ends the run at once; --resume then starts from the last checkpoint.
    """
    from ..trainer.run.preemption import EXIT_CODE, ending_on_signals

    asked = TrainOptions(**options)
    with nullcontext() if asked.print_config or asked.dry_run else ending_on_signals():
        finished = run(asked)
    if not finished:
        click.get_current_context().exit(EXIT_CODE)


def train(
    data: Places | None = None,
    *,
    out: AnyPlace,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    steps: int | None = None,
    resume: bool = False,
    allow_change: Collection[str] = (),
    on_report: OnReport = lambda report: None,
) -> OpenedRun:
    """Train a run as `thermopile train` does, with progress, and open it. An interrupt ends it after a checkpoint.

    data: a dataset, or a list to mix. out: the run's directory or address. settings: a tree as in a TOML file, over the
    preset's. resume: go on with the run at `out`, if there is one. on_report: called with each StepReport.
    Raises ConfigError, RunError, DatasetError, TrainingError, StateStoreError, OSError.

        >>> run = thermopile.train("data/mine", out="runs/mine", preset="small", settings={"epochs": 6})
        runs/mine: trained 24 steps; ...
    """
    from .inspection.opened_run import open_run

    places = () if data is None else tuple(places_of(data))
    given: dict[str, Any] = {"preset": preset, "settings": settings or {}, "steps": steps, "resume": resume}
    run(TrainOptions(places, out=place_of(out), allowed=tuple(allow_change), **given), on_report)
    return open_run(out)


def run(asked: TrainOptions, on_report: OnReport = lambda report: None, below: Layers | None = None) -> bool:
    """Train, or print the settings. Return False if a signal stopped the run. below: settings that options change."""
    from ..trainer.run.starting import Request, start

    directory = None if asked.out is None else RunDirectory(asked.out)
    with _ended_if_ranks_are_lost(), joined_world(end=_end) as world:
        with agreement(world.control, ConfigError):
            given = _layers(asked, below)
            request = Request(
                directory,
                # Whole names: an untrusted directory may be called "preset x".
                trusted={COMMAND_LINE, *(f"preset {name}" for name in preset_names())},
                resume=asked.resume,
                allowed=asked.allowed,
                accept_edits=asked.accept_config,
                allow_code=asked.allow_code,
                only_show=asked.print_config,
                is_command=True,
            )
        plan = start(given, request, world)
        if asked.print_config and world.is_first:
            from .settings import shown_settings

            for change in plan.changes:
                click.echo(change.arrow, err=True)
            click.echo(shown_settings(plan.config, plan.layers))
        if directory is None or asked.print_config:
            return True
        for line in plan.choices:
            click.echo(f"{directory.path}: {line}", err=True)
        if asked.dry_run:
            _rehearse(plan, directory, world, timed=asked.timed)
            return True
        return _train(plan, directory, world, on_report, accepted=asked.accept_config)


@contextmanager
def _ended_if_ranks_are_lost() -> Iterator[None]:
    """If other ranks are lost, print the error and exit at once, since threads may be waiting for them."""
    try:
        yield
    except RanksLostError as error:
        _end(error)


def _end(error: RanksLostError) -> NoReturn:
    """Print the error and exit at once. Any thread may call it."""
    _ending.acquire()  # kept: if both the training thread and another notice a loss, the second waits for the exit
    if sys.stderr.isatty():
        click.echo("\n\x1b[?25h", err=True, nl=False)  # below a progress bar that still runs and hides the cursor
    click.echo(f"Error: {plain_text(str(error), MAX_ERROR_CHARACTERS)}", err=True)
    os._exit(1)


def _layers(asked: TrainOptions, below: Layers | None) -> Layers:
    """Refuses unusable paths here, not in click's parsing, so that all ranks learn of it."""
    if asked.out is None and not asked.print_config:
        raise click.UsageError("Missing option '--out': the run directory")
    for data in asked.data:
        DATASET.convert(data, OPTIONS[0], None)
    if asked.timed and (asked.resume or not asked.dry_run or os.environ.get("WORLD_SIZE", "1") != "1"):
        raise click.UsageError("--timed is for a new run's --dry-run, on one rank")
    if asked.config_file is not None and not asked.config_file.is_present():
        raise click.UsageError(f"Invalid value for '--config': file {asked.config_file} does not exist")
    layers = below or Layers()
    if asked.preset is not None:
        layers.add_preset(asked.preset)
    if asked.config_file is not None:
        layers.add(read_toml(asked.config_file), f"--config {asked.config_file}")
    layers.add(asked.settings, COMMAND_LINE)
    files = {option: getattr(asked, option) for option in ("tars", "select", "weights", "without")}
    add_typed(layers, asked.overrides, asked.data, files)
    for key in ("steps", "on_nan"):
        if (value := getattr(asked, key)) is not None:
            layers.add({key: value}, f"--{key.replace('_', '-')}")
    if asked.init_from is not None:
        layers.add({"init": {"run": asked.init_from}}, "--init-from")
    if asked.grow:
        layers.add({"init": {"state": True}}, "--grow")
    if asked.shares:
        layers.add({"data": {"shares": [*asked.shares]}}, "--share")
    return layers


def _train(plan: Start, directory: RunDirectory, world: World, on_report: OnReport, *, accepted: bool) -> bool:
    """Train; return False if a signal stopped the run. accepted: config.toml was edited by hand."""
    from ..trainer.loop import FrozenPass, Trainer
    from ..trainer.run.preemption import StopRequest
    from ..trainer.run.selection_files import SELECTING, rows_of
    from .inspection.features.run_features import keep_features

    def say(text: str, err: bool = True) -> None:
        if world.is_first:
            click.echo(f"{directory.path}: {text}", err=err)

    data, resume = plan.config.data, plan.resume
    is_frozen = plan.config.objective.name == FROZEN
    with agreement(world.control, RunError):
        if directory.path.made_scratch() != directory.path:
            say(f"files of this machine are in {directory.local}")
        if resume and world.is_first:
            directory.warnings.begin(resuming=True)
    copied = sum(rows_of(file) for name in SELECTING if (file := getattr(data, name)))
    if copied > 10_000_000 and not resume:  # takes more than some two seconds
        say(f"copying {copied:,} rows of selection, weights and holes …")
    with (
        warnings_log(directory.warnings_file, world.rank if world.size > 1 else None),
        (FrozenPass if is_frozen else Trainer).open(
            plan.config, directory, resume=resume, world=world, parts=plan.parts
        ) as trainer,
    ):
        run = trainer.run
        finished = run.steps_done >= run.total_steps
        if resume and world.is_first and (accepted or not finished or data.tars):
            run.locked_directory.record(plan.config)  # the data's new path and other allowed changes
        if finished:
            say(f"finished at step {run.steps_done:,}; nothing to do", err=False)
            return True
        if resume:
            say(f"resuming at step {run.steps_done:,}")
        for advice in trainer.advice() if world.is_first else ():
            _log.warning("%s", advice)
        say(_in_words(run))
        compiled = ["the objective, in seconds"] * (run.objective.settings.compile is True)
        compiled += ["the encoders, in minutes"] * run.config.compile
        if compiled:
            say(f"the first step compiles {' and '.join(compiled)}; torch keeps the code")
        with (
            progress_bar("scoring" if is_frozen else "training", run.total_steps, hidden=not world.is_first) as bar,
            StopRequest(_acknowledge) as stop,
        ):
            bar.update(run.steps_done)
            progress = _TrainingProgress(bar, run.steps_done, on_report)
            trainer.train(progress, stop, lambda line: bar.note(_scores_in_words(line)))
        if run.steps_done < run.total_steps:
            done, signal = f"{run.steps_done:,}", stop.name or "a signal to another rank"
            say(f"stopped at step {done} by {signal}, checkpoint written; continue with --resume", err=False)
            return False
    if world.is_first:
        with task_bars() as show:
            keep_features(directory, partial(show, "features for inspect"))
    done = f"scored {run.order.samples:,} pairs" if is_frozen else f"trained {run.total_steps:,} steps"
    say(f"{done}; next: `thermopile inspect {quote(str(directory.path))}`", err=False)
    return True


class _LogFile(logging.Handler):
    """Opens the file for each warning, and ignores failures: the warning may be about that disk."""

    def __init__(self, path: Path, line: str) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S%z"))

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, TypeError, ValueError):  # the last two if a message does not fit its arguments
            line = " ".join(self.format(record).split()) + "\n"
            with os.fdopen(open_own(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
                file.write(line.encode(errors="backslashreplace"))


@contextmanager
def warnings_log(path: Path, rank: int | None = None) -> Iterator[None]:
    """During the block, append each warning of thermopile's loggers to `path`, one line with its local time.

    rank: included in every line; omit it with one process. The file is created by the first warning. Warnings still go
    to their other destinations, and a file that cannot be written has no effect.
    """
    who = "" if rank is None else f"[rank {rank}] "
    handlers: list[logging.Handler] = [_LogFile(path, f"%(asctime)s {who}%(message)s")]
    if not _PACKAGE.hasHandlers() and logging.lastResort:
        handlers.append(logging.lastResort)  # logging uses stderr only if there is no handler at all
    with ExitStack() as added:
        for handler in handlers:
            _PACKAGE.addHandler(handler)
            added.callback(_PACKAGE.removeHandler, handler)
        yield


def _rehearse(plan: Start, directory: RunDirectory, world: World, *, timed: bool) -> None:
    """Build what training builds, and print what it would need."""
    from ..state_store.schema import Schema
    from ..trainer.dry_run import dry_run
    from ..trainer.export import Format, why_impossible

    config, optimizer, kept = plan.config, plan.config.optimizer, plan.config.checkpoint
    with dry_run(config, directory, resume=plan.resume, world=world, parts=plan.parts) as trainer:
        if not world.is_first:
            return
        for advice in trainer.advice():
            _log.warning("%s", advice)
        click.echo(_in_words(run := trainer.run))
        parts = {**dict(run.encoders.named_children()), "objective": run.objective}
        counts = {name: sum(each.numel() for each in part.parameters()) for name, part in parts.items()}
        weights = [*run.encoders.parameters(), *run.objective.parameters()]
        trained = sum(each.numel() for each in weights if each.requires_grad)
        all_weights = sum(counts.values()) + (trained if trainer.average else 0)
        moments = {"sgd": int(bool(optimizer.momentum)), "lars": 1, "lion": 1}.get(optimizer.name, 2)
        row_bytes, rows = 4 * Schema(run.objective.fields).row_words, run.order.samples // world.size
        formats = (each for each in get_args(Format) if not why_impossible(config, each))
        often = f" and those of every {kept.keep_every:,} steps" if kept.keep_every else ""
        sizes = {
            "rows": min(rows * row_bytes, config.state.memory_budget or rows * row_bytes),
            "weights": 4 * (all_weights + (1 + moments) * trained),
            "checkpoint": 4 * (all_weights + moments * trained),
            "snapshot": run.order.samples * row_bytes,
        }
        of = {name: in_units(size) for name, size in sizes.items()}
        parameters = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
        facts = [
            ("parameters", f"{parameters}; {trained:,} trained"),
            ("steps", f"{run.total_steps:,}, {run.order.steps_per_epoch:,} an epoch, {config.batch_size:,} samples "
             "each"),
            ("memory", f"{of['rows']} for the samples' state on the host of a rank"),
            ("device", f"{of['weights']} for weights, gradients and optimiser; not activations"),
            ("disk", f"{of['checkpoint']} a checkpoint, {kept.keep_last}{often} are kept; up to {of['snapshot']} a "
             "snapshot of the state"),
            ("export", " or ".join(formats)),
        ]  # fmt: skip
    if timed:
        from .bench.step import step_cost

        with working("training twenty steps …"), TemporaryDirectory(prefix="thermopile-") as folder:
            each = step_cost(config, 10, Path(folder)).step_ms / 1e3
        facts.append(("time", f"{duration(each * run.total_steps)}, {each:.2g} s a step, without evaluations"))
    elif not plan.resume and world.size == 1:
        facts.append(("time", "add --timed to train twenty steps and estimate it"))
    print_facts(facts)


def _in_words(run: Run) -> str:
    dataset, data = run.dataset, run.config.data
    selected = f"{run.order.samples:,} selected of " if data.select else ""
    parameters = sum(weights.numel() for weights in run.encoders.parameters() if weights.requires_grad)
    ranks = f" on {run.world.size} ranks" if run.world.size > 1 else ""
    speed, epochs = "", -(-run.total_steps // run.order.steps_per_epoch)
    if run.device.type == "cuda":
        cure = "--set compile=true takes minutes once, then steps are faster"
        slow = "" if run.config.compile else f", encoders not compiled ({cure})"
        speed = f" in {run.config.precision}{slow}"
    kind = "pairs" if run.mode == "bimodal" else "pictures"
    weighted = ", with weights" * bool(data.weights) + ", without those of data.without" * bool(data.without)
    tars = f", pictures in {dataset.tars.root}" if dataset.tars else ""
    left_out = max(0, run.order.samples - run.order.steps_per_epoch * run.config.batch_size)
    left = "" if data.parts or not left_out else f", {left_out:,} samples not drawn in an epoch"
    planted = data.planted if isinstance(data.planted, tuple) else (data.planted,)
    shares = " and ".join(f"{100 * share:.3g}%" for share in planted)
    wrong = f", {shares} of them with another one's caption (data.planted)" if any(planted) else ""
    samples = f"{selected}{dataset.n:,} {kind} from {dataset.place}{tars}{weighted}{wrong}"
    encoders = f"{run.device}{speed}{ranks}, {parameters:,} encoder parameters"
    steps = f"{run.total_steps:,} steps in {epochs:,} {'epoch' if epochs == 1 else 'epochs'}{left}"
    return f"{samples}, {encoders}, {steps}"


def _acknowledge(signal_name: str) -> None:
    # Not through sys.stderr: the signal may have interrupted a write to it.
    words = f"\n{signal_name}: writing a checkpoint, then stopping; a second signal ends the run at once\n"
    os.write(2, words.encode())


class _TrainingProgress:
    def __init__(self, bar: ProgressBar, first_step: int, then: OnReport) -> None:
        self._bar, self._hints_from, self._then = bar, first_step + 50, then  # once start-up waits are over
        self._hinted: set[str] = set()

    def __call__(self, report: StepReport) -> None:
        tau = "" if report.tau_mean is None else f"tau {report.tau_mean:.4f}  "
        shares = "  ".join(f"{words} {report.split[part]:.0%}" for part, words in SHOWN.items() if part in report.split)
        found = "" if report.retrieval_accuracy is None else f"retrieval {percent(report.retrieval_accuracy, 1)}  "
        speed = f"{report.samples_per_second:,.0f} samples/s"
        self._bar.update(report.step, f"loss {report.loss:.4f}  {tau}{found}{speed}  {shares}")
        for problem, hint in report.hints.items():
            if report.step >= self._hints_from and problem not in self._hinted:
                self._hinted.add(problem)
                self._bar.note(hint)
        self._then(report)


def _scores_in_words(line: dict[str, Any]) -> str:
    """Summarise an evaluation in one line: each method's first score over all samples."""
    firsts = {method: next(iter(variants.items())) for method, variants in line["evaluation"].items()}
    scores = (f"{LABELS[method].format(variant)}: {percent(of['all'], 1)}" for method, (variant, of) in firsts.items())
    of = " of averaged weights" if line.get("weights") == "averaged" else ""
    return f"step {line['step']:,}{of}: {'; '.join(scores)}"
