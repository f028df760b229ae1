"""`thermopile train`: start or resume a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .dataset_path import DatasetPath
from .plain_text import MAX_ERROR_CHARACTERS, plain_text
from .progress import progress_bar

if TYPE_CHECKING:
    from ..trainer.config import TrainConfig
    from ..trainer.config_layers import Layers
    from ..trainer.loop import Trainer
    from ..trainer.resume_settings import Change
    from ..trainer.run_directory import RunDirectory
    from ..trainer.step_report import StepReport
    from ..trainer.world import World
    from .progress import ProgressBar

SHOWN = {
    "data_wait": "data wait",
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

_COMMAND_LINE = "--set"

_log = logging.getLogger(__name__)


class _TrainCommand(click.Command):
    """Explains how to pass a setting that was given as an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from ..trainer.config import settings_named

            if keys := settings_named(error.option_name):
                said = " or ".join(f"--set {key}=VALUE" for key in keys)
                raise click.UsageError(f"No such option: {error.option_name}. It is a setting: {said}", ctx) from None
            raise


@click.command(
    cls=_TrainCommand,
    epilog="\b\nExamples:\n"
    "  thermopile train --preset glyphs --data data/glyphs --out runs/glyphs\n"
    "  thermopile train --data data/cc3m --out runs/cc3m --set epochs=30 --set optimizer.lr=2e-4\n"
    "  thermopile train --preset isogclr/cc3m --data data/cc3m --print-config\n"
    "  thermopile train --out runs/cc3m --resume\n"
    "  thermopile train --out runs/cc3m --resume --set epochs=40 --allow-change epochs\n"
    "  thermopile train --data data/own --out runs/own --config runs/cc3m/config.toml --init-from runs/cc3m",
)
@click.option("--data", type=click.Path(path_type=Path), help="The dataset directory.")
@click.option("--out", type=click.Path(path_type=Path), help="The run directory; optional with --print-config.")
@click.option("--preset", help="Start from these named settings; an unknown name lists the presets.")
@click.option("--config", type=click.Path(path_type=Path), help="A TOML file of settings.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting. Repeatable.")
@click.option("--init-from", metavar="RUN[@step-N]", help="Initialise the encoders from another run's checkpoint.")
@click.option("--on-nan", type=click.Choice(["stop", "skip"]),
              help="If a loss is not finite: stop the run, or skip the step and continue.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Resume the run in OUT; start it if there is none.")
@click.option("--allow-change", "allowed", multiple=True, metavar="KEY",
              help="With --resume: allow this setting, or table of settings, to change. Repeatable.")  # fmt: skip
@click.option("--accept-config", is_flag=True,
              help="With --resume: accept your manual edits of OUT/config.toml.")  # fmt: skip
@click.option("--allow-code", is_flag=True,
              help="Allow OUT's settings or --config to run code: data.augmentation.")  # fmt: skip
@click.option("--print-config", is_flag=True, help="Print every setting and its origin; train nothing.")
def train(
    data: Path | None, out: Path | None, preset: str | None, config: Path | None, overrides: tuple[str, ...],
    init_from: str | None, on_nan: str | None, resume: bool, allowed: tuple[str, ...], accept_config: bool,
    allow_code: bool,
    print_config: bool,
) -> None:  # fmt: skip
    """Train encoders with a temperature per sample.

    Later settings override earlier ones: defaults, --preset, --config, --set, --init-from, --on-nan, --data.
    OUT/config.toml records the result.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 finish the current step, write a checkpoint and exit with code 75. A second
    signal ends the run at once; --resume then starts from the last checkpoint.
    """
    from ..state_store.ranks import agreement
    from ..trainer.config import to_tree
    from ..trainer.config_layers import Layers
    from ..trainer.errors import ConfigError
    from ..trainer.preemption import EXIT_CODE
    from ..trainer.run_directory import RunDirectory
    from ..trainer.world import joined_world, refuse_separate_directories

    run = None if out is None else RunDirectory(out)
    finished = True
    # Check settings and dataset before importing torch, which takes seconds.
    with _ended_if_ranks_are_lost(), joined_world() as world:
        with agreement(world.control, ConfigError):
            _check_paths(run, data, config, needs_run=not print_config)
            if run is not None and not (resume or print_config):
                run.refuse_existing()
            is_begun = run is not None and resume and run.exists()
        # Use one rank's answer: it may have started the run before another rank looked.
        begun = run if world.control.broadcast(is_begun) else None
        if begun is not None and not print_config:
            refuse_separate_directories(world, begun.path)
        changes: list[Change] = []
        with agreement(world.control, ConfigError):
            layers, recorded = Layers(), None if begun is None else begun.config_to_resume(accept_edits=accept_config)
            if begun is not None and recorded is not None:
                layers.add(to_tree(recorded), str(begun.config_file))
            _lay(layers, data, preset, config, overrides, init_from, on_nan)
            settings = layers.load()
            if not (allow_code or print_config):
                _refuse_code(settings, layers)
        if begun is None or recorded is None:
            settings = _new(settings, world, run if resume else None, needs_data=not print_config)
        else:
            settings, changes = _resumed(settings, begun, recorded, world, allowed)
        if print_config and world.is_first:
            for change in changes:
                click.echo(change.arrow, err=True)
            from .shown_settings import shown_settings

            click.echo(shown_settings(settings, layers))
        elif run is not None and not print_config:
            finished = _train(settings, run, world, resuming=begun is not None, accepted=accept_config)
    if not finished:
        click.get_current_context().exit(EXIT_CODE)


def _check_paths(run: RunDirectory | None, data: Path | None, config: Path | None, *, needs_run: bool) -> None:
    """Refuse unusable paths here, not in click's parsing, so that all ranks learn of it."""
    if run is None and needs_run:
        raise click.UsageError("Missing option '--out': the run directory")
    if data is not None:
        DatasetPath().convert(data, next(param for param in train.params if param.name == "data"), None)
    if config is not None and not config.is_file():
        raise click.UsageError(f"Invalid value for '--config': file {config} does not exist")


def _lay(layers: Layers, data: Path | None, preset: str | None, config: Path | None, overrides: tuple[str, ...],
         init_from: str | None, on_nan: str | None) -> None:  # fmt: skip
    """Add the layers of the command line."""
    from ..trainer.config_layers import apply_overrides, read_toml

    if preset is not None:
        layers.add_preset(preset)
    if config is not None:
        layers.add(read_toml(config), f"--config {config}")
    asked: dict[str, Any] = {}
    apply_overrides(asked, overrides)
    layers.add(asked, _COMMAND_LINE)
    if init_from is not None:
        layers.add({"init_from": init_from}, "--init-from")
    if on_nan is not None:
        layers.add({"on_nan": on_nan}, "--on-nan")
    if data is not None:
        layers.add({"data": {"path": str(data.resolve())}}, "--data")


def _refuse_code(settings: TrainConfig, layers: Layers) -> None:
    """Refuse code named in a config file, which may come from someone else."""
    from ..trainer.config_layers import preset_names
    from ..trainer.errors import ConfigError

    key, code = "data.augmentation", settings.data.augmentation
    # Compare whole names: an untrusted directory may be called "preset x".
    own = {_COMMAND_LINE, *(f"preset {name}" for name in preset_names())}
    if code and (origin := layers.origins[key]) not in own:
        raise ConfigError(
            f"{origin} sets {key} = {code!r}, which imports that module and runs its code. "
            f"If you trust it, add --allow-code; a new run can drop it with --set {key}="
        )


def _new(settings: TrainConfig, world: World, absent: RunDirectory | None, *, needs_data: bool) -> TrainConfig:
    """Return the settings of a new run, resolved if there is a dataset. All ranks call it.

    absent: the run that --resume named but that does not exist yet.
    """
    from ..pipeline.dataset import Dataset
    from ..state_store.ranks import agreement
    from ..trainer.errors import ConfigError, RunError

    with agreement(world.control, ConfigError):
        dataset = Dataset(Path(settings.data.path)) if settings.data.path else None
        if dataset is None and needs_data:
            start = "" if absent is None else f"{absent.path} has no run to resume, and a new one has "
            raise click.UsageError(f"{start}no dataset: pass --data, a directory written by `thermopile convert`")
    source = ""
    with agreement(world.control, RunError):
        if settings.init_from and world.is_first:
            from ..trainer.encoders.initial_weights import pinned

            source = pinned(settings.init_from)
    # Use one rank's answer: the other run may still be training and have a newer checkpoint by now.
    asked, source = world.control.broadcast((settings.init_from, source))
    if settings.init_from == asked:  # a rank with another value is refused later, with its other differences
        settings = settings.model_copy(update={"init_from": source})
    if dataset is None:
        return settings
    from ..trainer.build import resolve

    with agreement(world.control, ConfigError):
        return resolve(settings, dataset, world)


def _resumed(
    asked: TrainConfig, run: RunDirectory, recorded: TrainConfig, world: World, allowed: tuple[str, ...]
) -> tuple[TrainConfig, list[Change]]:
    """Return the run's settings with the allowed changes, and those changes; refuse any other change by name.

    All ranks call it.
    """
    from ..pipeline.dataset import Dataset
    from ..pipeline.errors import DatasetError
    from ..state_store.ranks import agreement
    from ..trainer.errors import ConfigError

    with agreement(world.control, ConfigError):
        try:
            dataset = Dataset(Path(asked.data.path))
        except DatasetError as error:
            moved = "If the run's dataset was moved, pass its new path with --data."
            raise DatasetError(f"{error} {moved}") from error
    from ..trainer.build import resolve
    from ..trainer.resume_settings import allowed_changes, as_recorded

    with agreement(world.control, ConfigError):
        asked = as_recorded(asked, recorded)
        # Resolve the recorded settings too, so that settings added since then get their defaults.
        recorded, asked = resolve(recorded, dataset, world), resolve(asked, dataset, world)
        return asked, allowed_changes(run.path, recorded, asked, allowed)


def _train(settings: TrainConfig, run: RunDirectory, world: World, *, resuming: bool, accepted: bool) -> bool:
    """Train; return False if a signal stopped the run. accepted: config.toml was edited by hand."""
    from ..trainer.loop import Trainer
    from ..trainer.preemption import StopRequest
    from ..trainer.warnings_log import warnings_log

    def say(text: str, err: bool = True) -> None:
        if world.is_first:
            click.echo(f"{run.path}: {text}", err=err)

    with (
        warnings_log(run.warnings_file, world.rank if world.size > 1 else None),
        Trainer.open(settings, run, resume=resuming, world=world) as trainer,
    ):
        finished = trainer.steps_done >= trainer.total_steps
        if resuming and world.is_first and (accepted or not finished):
            run.record(settings)  # the data's new path and other allowed changes
        if finished:
            say(f"finished at step {trainer.steps_done:,}; nothing to do", err=False)
            return True
        if resuming:
            say(f"resuming at step {trainer.steps_done:,}")
        if world.is_first:
            for advice in trainer.advice():
                _log.warning("%s", advice)
        say(_in_words(trainer))
        with progress_bar("training", trainer.total_steps, hidden=not world.is_first) as bar, (
            StopRequest(_acknowledge)
        ) as stop:  # fmt: skip
            bar.update(trainer.steps_done)
            trainer.run(_Shown(bar, trainer.steps_done), stop, lambda line: bar.note(_scores_in_words(line)))
        if trainer.steps_done < trainer.total_steps:
            asked = stop.name or "a signal to another rank"
            say(
                f"stopped at step {trainer.steps_done:,} by {asked}, checkpoint written; continue with --resume",
                err=False,
            )
            return False
    say(f"trained {trainer.total_steps:,} steps; next: `thermopile inspect {run.path}`", err=False)
    return True


def _in_words(trainer: Trainer) -> str:
    """Describe the training in one line."""
    dataset, config = trainer.dataset, trainer.config
    parameters = sum(weights.numel() for weights in trainer.encoders.parameters())
    ranks = f" on {trainer.world.size} ranks" if trainer.world.size > 1 else ""
    return (f"{dataset.n:,} {'pairs' if trainer.mode == 'bimodal' else 'pictures'} from {dataset.path}, "
            f"{trainer.device}{ranks}, {parameters:,} encoder parameters, {trainer.total_steps:,} steps in "
            f"{config.epochs:,} {'epoch' if config.epochs == 1 else 'epochs'}")  # fmt: skip


def _acknowledge(signal_name: str) -> None:
    # Not through sys.stderr: the signal may have interrupted a write to it.
    os.write(
        2, f"\n{signal_name}: writing a checkpoint, then stopping; a second signal ends the run at once\n".encode()
    )


@contextmanager
def _ended_if_ranks_are_lost() -> Iterator[None]:
    """If other ranks are lost, print the error and exit at once, since threads may be waiting for them."""
    from ..trainer.errors import RanksLostError

    try:
        yield
    except RanksLostError as error:
        click.echo(f"Error: {plain_text(str(error), MAX_ERROR_CHARACTERS)}", err=True)
        os._exit(1)


class _Shown:
    """Shows step reports in the progress bar, and each hint about a wait once."""

    def __init__(self, bar: ProgressBar, first_step: int) -> None:
        self._bar, self._hints_from = bar, first_step + STEADY_STEPS
        self._hinted: set[str] = set()

    def __call__(self, report: StepReport) -> None:
        from ..trainer.step_report import hints

        self._bar.update(report.step, _words(report))
        for part, hint in hints(report.split).items():
            if report.step >= self._hints_from and part not in self._hinted:
                self._hinted.add(part)
                self._bar.note(hint)


def _scores_in_words(line: dict[str, Any]) -> str:
    """Summarise an evaluation in one line: each method's first score over all samples."""
    from .eval_cmd import LABELS

    firsts = {method: next(iter(variants.items())) for method, variants in line["evaluation"].items()}
    scores = (f"{LABELS[method].format(variant)}: {of['all']:.1%}" for method, (variant, of) in firsts.items())
    return f"step {line['step']:,}: {'; '.join(scores)}"


def _words(report: StepReport) -> str:
    tau = "" if report.tau_mean is None else f"tau {report.tau_mean:.4f}  "
    shares = "  ".join(f"{words} {report.split[part]:.0%}" for part, words in SHOWN.items() if part in report.split)
    return f"loss {report.loss:.4f}  {tau}{report.samples_per_second:,.0f} samples/s  {shares}"
