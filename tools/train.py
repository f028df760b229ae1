"""`thermopile train`: start or resume a run. torch is imported last."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ..pipeline.dataset import Dataset
from ..pipeline.mixture import open_dataset
from ..state_store.ranks import agreement
from ..trainer.config import EncoderConfig, TrainConfig, to_tree
from ..trainer.config.layers import Layers, preset_names, read_toml
from ..trainer.config.own_code import announce_code, code_in, refuse_code
from ..trainer.errors import ConfigError, RanksLostError, RunError
from ..trainer.plugins import OPEN_CLIP, TIMM, is_directory
from ..trainer.run.own_dataset import open_own
from ..trainer.run_directory import RunDirectory
from ..trainer.world import World, joined_world, refuse_separate_directories
from .arguments import DatasetPath
from .eval import LABELS
from .printing import MAX_ERROR_CHARACTERS, plain_text, print_facts
from .progress import ProgressBar, duration, in_units, progress_bar, working
from .train_options import COMMAND_LINE, OPTIONS, TrainCommand, TrainOptions, add_typed

if TYPE_CHECKING:
    from ..trainer.loop import Trainer
    from ..trainer.metrics.step_report import StepReport
    from ..trainer.run.resume_settings import Change

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
STEADY_STEPS = 50
"""Steps until start-up waits have passed."""
ROWS_IN_TWO_SECONDS = 10_000_000
"""Rows of a selection, or of weights, that take about two seconds to copy."""
_ending = threading.Lock()

_log = logging.getLogger(__name__)


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
def train(**options: Any) -> None:
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


def run(asked: TrainOptions) -> bool:
    """Train, or print the settings. Return False if a signal stopped the run."""
    directory = None if asked.out is None else RunDirectory(asked.out)
    # Check settings and dataset before importing torch, which takes seconds.
    with _ended_if_ranks_are_lost(), joined_world(end=_end) as world:
        with agreement(world.control, ConfigError):
            _check_paths(asked)
            # Only one rank looks: on a network disk another would remember for a minute that a file is missing.
            looked_at = directory if world.is_first else None
            if looked_at is not None and not (asked.resume or asked.print_config):
                looked_at.refuse_existing()
            is_begun = looked_at is not None and asked.resume and looked_at.exists()
        begun = directory if world.control.broadcast(is_begun) else None
        if begun is not None and not asked.print_config:
            refuse_separate_directories(world, begun.path)
        changes: list[Change] = []
        chosen: list[str] = []
        with agreement(world.control, ConfigError):
            recorded = None if begun is None else begun.config_to_resume(accept_edits=asked.accept_config)
            layers = _layers(asked, begun, recorded)
            settings = layers.load()
            if not asked.allow_code:
                _refuse_code_of_files(settings, recorded, layers)
            if world.is_first:
                announce_code(code_in(settings))
        with agreement(world.control, ConfigError):
            dataset = _dataset_of(settings, asked, begun)
        with agreement(world.slow_group, ConfigError):
            if begun is None:
                _fetch_typed(settings, asked, layers, has_text=dataset is None or dataset.index.mode == "pairs")
        if dataset is not None or settings.init_from or world.size > 1:
            from ..trainer.run.chosen import choices
            from ..trainer.run.resume_settings import settled

            given = settings
            settings, changes = settled(begun, recorded, given, dataset, world, asked.allowed)
            with agreement(world.control, ConfigError):
                if world.is_first and dataset is not None and begun is None and not asked.print_config:
                    chosen = choices(given, settings, dataset)
        if asked.print_config and world.is_first:
            from .settings import shown_settings

            for change in changes:
                click.echo(change.arrow, err=True)
            click.echo(shown_settings(settings, layers))
        if directory is None or asked.print_config:
            return True
        for line in chosen:
            click.echo(f"{directory.path}: {line}", err=True)
        if asked.dry_run:
            _rehearse(settings, directory, world, resuming=begun is not None, timed=asked.timed)
            return True
        return _train(settings, directory, world, resuming=begun is not None, accepted=asked.accept_config)


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


def _check_paths(asked: TrainOptions) -> None:
    """Refuse unusable paths here, not in click's parsing, so that all ranks learn of it."""
    if asked.out is None and not asked.print_config:
        raise click.UsageError("Missing option '--out': the run directory")
    for data in asked.data:
        DatasetPath().convert(data, OPTIONS[0], None)
    if asked.timed and (asked.resume or not asked.dry_run or os.environ.get("WORLD_SIZE", "1") != "1"):
        raise click.UsageError("--timed is for a new run's --dry-run, on one rank")
    if asked.config_file is not None and not asked.config_file.is_present():
        raise click.UsageError(f"Invalid value for '--config': file {asked.config_file} does not exist")


def _layers(asked: TrainOptions, begun: RunDirectory | None, recorded: TrainConfig | None) -> Layers:
    """Return the settings that the run has, if it has begun, below those of the command line."""
    layers = Layers()
    if begun is not None and recorded is not None:
        layers.add(to_tree(recorded), str(begun.config_file))
    if asked.preset is not None:
        layers.add_preset(asked.preset)
    if asked.config_file is not None:
        layers.add(read_toml(asked.config_file), f"--config {asked.config_file}")
    files = {option: getattr(asked, option) for option in ("tars", "select", "weights", "without")}
    add_typed(layers, asked.overrides, asked.data, files)
    for key in ("steps", "init_from", "on_nan"):
        if (value := getattr(asked, key)) is not None:
            layers.add({key: value}, f"--{key.replace('_', '-')}")
    if asked.grow:
        layers.add({"init_state": True}, "--grow")
    if asked.shares:
        layers.add({"data": {"shares": [*asked.shares]}}, "--share")
    return layers


def _own_origins() -> set[str]:
    """Return the origins of settings that the user trusts by typing them."""
    # Whole names: an untrusted directory may be called "preset x".
    return {COMMAND_LINE, *(f"preset {name}" for name in preset_names())}


def _fetch_typed(settings: TrainConfig, asked: TrainOptions, layers: Layers, *, has_text: bool) -> None:
    """Fetch the models of the hub that this command names, not those that a file of settings does.

    Raises ConfigError for weights of timm or open_clip that only a file names: they are fetched when encoders are made.
    """
    for side in ("image", "text") if has_text and settings.objective.mode != "unimodal" else ("image",):
        encoder: EncoderConfig = getattr(settings.model, side)
        name, pretrained = encoder.name, encoder.config.get("pretrained", not encoder.name.startswith(TIMM))
        of_timm, has_weights = name.startswith(TIMM), name.startswith((TIMM, OPEN_CLIP)) and name.count(":") > 1
        keys = [f"model.{side}.name"] + [f"model.{side}.config.pretrained"] * (of_timm and not has_weights)
        is_typed = asked.allow_code or {layers.origins.get(key) for key in keys} <= _own_origins()
        if (has_weights or (of_timm and pretrained)) and not is_typed:
            raise ConfigError(
                f"a file of settings names {name}, whose weights would be fetched or read; type {' and '.join(keys)} "
                "with --set, or allow it with --allow-code"
            )
        if is_typed and is_directory(name):  # or a name of the hub
            from ..trainer.encoders.hf_hub import snapshot  # late, because it imports torch

            snapshot(name, fetching=True, weights=bool(pretrained))
        elif name.startswith(OPEN_CLIP) and has_weights:  # its temperature is a setting
            from ..trainer.encoders.open_clip_encoders import weights_of

            weights_of(name.removeprefix(OPEN_CLIP), fetching=True)


def _refuse_code_of_files(settings: TrainConfig, recorded: TrainConfig | None, layers: Layers) -> None:
    """Refuse code that a file of settings names, which may come from someone else, and this command does not.

    recorded: the settings of the run to resume, which are resolved as well.
    """
    own = _own_origins()
    asked = {key: code for key, code in code_in(settings).items() if layers.origins[key] in own}
    for config, where in ((settings, ""), (recorded, "the run")):
        for key, code in code_in(config).items() if config else ():
            if asked.get(key) != code:
                refuse_code({key: code}, where or layers.origins[key])


def _dataset_of(settings: TrainConfig, asked: TrainOptions, begun: RunDirectory | None) -> Dataset | None:
    """Open the dataset of the settings; return None if a new run, which is only to be printed, names none."""
    if begun is not None:
        return open_own(begun, settings.data.places, settings.data.tars)
    if not settings.data.places:
        if asked.print_config:
            return None
        start = f"{asked.out} has no run to resume, and a new one has " if asked.resume else ""
        raise click.UsageError(f"{start}no dataset: pass --data, a directory written by `thermopile convert`")
    return open_dataset(settings.data.places, settings.data.tars)


def _train(settings: TrainConfig, run: RunDirectory, world: World, *, resuming: bool, accepted: bool) -> bool:
    """Train; return False if a signal stopped the run. accepted: config.toml was edited by hand."""
    from ..trainer.loop import Trainer
    from ..trainer.run.preemption import StopRequest
    from ..trainer.run.selection_files import SELECTING, rows_of
    from .inspection.features.drawn import keep_features
    from .warnings_log import warnings_log

    def say(text: str, err: bool = True) -> None:
        if world.is_first:
            click.echo(f"{run.path}: {text}", err=err)

    with agreement(world.control, RunError):
        if run.path.made_scratch() != run.path:
            say(f"files of this machine are in {run.local}")
        if resuming and world.is_first:
            run.warnings.begin(resuming=True)
    copied = sum(rows_of(file) for name in SELECTING if (file := getattr(settings.data, name)))
    if copied > ROWS_IN_TWO_SECONDS and not resuming:
        say(f"copying {copied:,} rows of selection, weights and holes …")
    with (
        warnings_log(run.warnings_file, world.rank if world.size > 1 else None),
        Trainer(settings, run, resume=resuming, world=world) as trainer,
    ):
        finished = trainer.steps_done >= trainer.total_steps
        if resuming and world.is_first and (accepted or not finished or settings.data.tars):
            trainer.held_directory.record(settings)  # the data's new path and other allowed changes
        if finished:
            say(f"finished at step {trainer.steps_done:,}; nothing to do", err=False)
            return True
        if resuming:
            say(f"resuming at step {trainer.steps_done:,}")
        for advice in trainer.advice() if world.is_first else ():
            _log.warning("%s", advice)
        say(_in_words(trainer))
        with (
            progress_bar("training", trainer.total_steps, hidden=not world.is_first) as bar,
            StopRequest(_acknowledge) as stop,
        ):
            bar.update(trainer.steps_done)
            trainer.run(_Shown(bar, trainer.steps_done), stop, lambda line: bar.note(_scores_in_words(line)))
        if trainer.steps_done < trainer.total_steps:
            done, signal = f"{trainer.steps_done:,}", stop.name or "a signal to another rank"
            say(f"stopped at step {done} by {signal}, checkpoint written; continue with --resume", err=False)
            return False
    if world.is_first:
        keep_features(trainer.run_directory)
    say(f"trained {trainer.total_steps:,} steps; next: `thermopile inspect {run.path}`", err=False)
    return True


def _rehearse(settings: TrainConfig, run: RunDirectory, world: World, *, resuming: bool, timed: bool) -> None:
    """Build what training builds, and print what it would need."""
    from ..trainer.dry_run import DryRun, seconds_a_step

    with DryRun(settings, run, resume=resuming, world=world) as trainer:
        needs = trainer.needs()
        if not world.is_first:
            return
        for advice in trainer.advice():
            _log.warning("%s", advice)
        click.echo(_in_words(trainer))
        kept = f"{settings.checkpoint.keep_last}"
        if every := settings.checkpoint.keep_every:
            kept += f" and those of every {every:,} steps"
        parameters = ", ".join(f"{name} {count:,}" for name, count in needs.parameters.items())
        facts = [
            ("parameters", f"{parameters}; {needs.trained:,} trained"),
            ("steps", f"{needs.steps:,}, {needs.steps_per_epoch:,} an epoch, {settings.batch_size:,} samples each"),
            ("memory", f"{in_units(needs.state_in_memory)} for the samples' state on the host of a rank"),
            ("device", f"{in_units(needs.weights_on_device)} for weights, gradients and optimiser; not activations"),
            ("disk", f"{in_units(needs.checkpoint)} a checkpoint, {kept} are kept; up to "
             f"{in_units(needs.snapshot)} a snapshot of the state"),
            ("export", " or ".join(needs.formats)),
        ]  # fmt: skip
    if timed:
        with working("training ten steps …"):
            each = seconds_a_step(settings)
        facts.append(("time", f"{duration(each * needs.steps)}, {each:.2g} s a step, without evaluations"))
    elif not resuming and world.size == 1:
        facts.append(("time", "add --timed to train ten steps and estimate it"))
    print_facts(facts)


def _in_words(trainer: Trainer) -> str:
    """Describe the training in one line."""
    dataset, config = trainer.dataset, trainer.config
    selected = f"{trainer.order.samples:,} selected of " if config.data.select else ""
    parameters = sum(weights.numel() for weights in trainer.encoders.parameters() if weights.requires_grad)
    ranks = f" on {trainer.world.size} ranks" if trainer.world.size > 1 else ""
    speed, epochs = "", -(-trainer.total_steps // trainer.order.steps_per_epoch)
    if trainer.device.type == "cuda":
        slow = "" if config.compile else ", not compiled (--set compile=true takes minutes once, then steps are faster)"
        speed = f" in {config.precision}{slow}"
    kind = "pairs" if trainer.mode == "bimodal" else "pictures"
    weighted = ", with weights" if config.data.weights else ""
    tars = f", pictures in {dataset.tars.root}" if dataset.tars else ""
    left_out = trainer.order.samples - trainer.order.steps_per_epoch * config.batch_size
    left = "" if config.data.parts or not left_out else f", {left_out:,} samples not drawn in an epoch"
    wrong = f", {config.data.planted} of them with another one's caption (data.planted)" if config.data.planted else ""
    return (
        f"{selected}{dataset.n:,} {kind} from {dataset.place}{tars}{weighted}{wrong}, "
        f"{trainer.device}{speed}{ranks}, {parameters:,} encoder parameters, {trainer.total_steps:,} steps in "
        f"{epochs:,} {'epoch' if epochs == 1 else 'epochs'}{left}"
    )


def _acknowledge(signal_name: str) -> None:
    # Not through sys.stderr: the signal may have interrupted a write to it.
    words = f"\n{signal_name}: writing a checkpoint, then stopping; a second signal ends the run at once\n"
    os.write(2, words.encode())


class _Shown:
    """Shows step reports in the progress bar, and each hint once."""

    def __init__(self, bar: ProgressBar, first_step: int) -> None:
        self._bar, self._hints_from = bar, first_step + STEADY_STEPS
        self._hinted: set[str] = set()

    def __call__(self, report: StepReport) -> None:
        tau = "" if report.tau_mean is None else f"tau {report.tau_mean:.4f}  "
        shares = "  ".join(f"{words} {report.split[part]:.0%}" for part, words in SHOWN.items() if part in report.split)
        found = "" if report.retrieval_accuracy is None else f"retrieval {report.retrieval_accuracy:.1%}  "
        speed = f"{report.samples_per_second:,.0f} samples/s"
        self._bar.update(report.step, f"loss {report.loss:.4f}  {tau}{found}{speed}  {shares}")
        for problem, hint in report.hints.items():
            if report.step >= self._hints_from and problem not in self._hinted:
                self._hinted.add(problem)
                self._bar.note(hint)


def _scores_in_words(line: dict[str, Any]) -> str:
    """Summarise an evaluation in one line: each method's first score over all samples."""
    firsts = {method: next(iter(variants.items())) for method, variants in line["evaluation"].items()}
    scores = (f"{LABELS[method].format(variant)}: {of['all']:.1%}" for method, (variant, of) in firsts.items())
    of = " of averaged weights" if line.get("weights") == "averaged" else ""
    return f"step {line['step']:,}{of}: {'; '.join(scores)}"
