"""`thermopile train`: a run from its settings, or the continuation of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .progress import progress_bar

if TYPE_CHECKING:
    from ..trainer.config import TrainConfig
    from ..trainer.loop import StepReport
    from ..trainer.run_directory import RunDirectory


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile train --preset glyphs --data data/glyphs --out runs/glyphs\n"
    "  thermopile train --data data/cc3m --out runs/cc3m --set epochs=30 --set optimizer.lr=2e-4\n"
    "  thermopile train --out runs/cc3m --resume"
)
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="The dataset directory.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The run directory.")
@click.option("--preset", help="Start from the settings of this name.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Settings, as TOML.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="One setting; may be repeated.")
@click.option("--resume", is_flag=True, help="Continue the run in OUT; start it where there is none yet.")
def train(
    data: Path | None, out: Path, preset: str | None, config: Path | None, overrides: tuple[str, ...], resume: bool
) -> None:
    """Train encoders with a temperature for every sample.

    Later settings win: defaults, --preset, --config, --set, --data. OUT/config.toml records them all.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 stop the run after the step that it is at, with a checkpoint and exit code 75;
    a second one ends it at once, back to the checkpoint before.
    """
    from ..trainer.loop import Trainer
    from ..trainer.preemption import EXIT_CODE, StopRequest
    from ..trainer.run_directory import RunDirectory

    run = RunDirectory(out)
    resuming = resume and run.exists()
    settings = _resumed(run, data, preset, config, overrides) if resuming else _new(data, preset, config, overrides)
    with Trainer.open(settings, run, resume=resuming) as trainer:
        if trainer.steps_done == trainer.total_steps:
            click.echo(f"{out}: finished at step {trainer.total_steps:,}; nothing to do")
            return
        for advice in trainer.objective.advice(settings.batch_size):
            click.echo(f"Warning: {advice}", err=True)
        if resuming:
            run.record(settings)  # where the data is now, and whatever else may change
            click.echo(f"resuming at step {trainer.steps_done:,}", err=True)
        with progress_bar("training", trainer.total_steps) as bar, StopRequest(_acknowledge) as stop:
            trainer.run(lambda report: bar.update(report.step, _words(report)), stop)
        if trainer.steps_done < trainer.total_steps:
            click.echo(
                f"{out}: stopped at step {trainer.steps_done:,} by {stop.name}, with a checkpoint; --resume goes on"
            )
            click.get_current_context().exit(EXIT_CODE)
    click.echo(f"{out}: trained {trainer.total_steps:,} steps; look at it with `thermopile inspect {out}`")


def _acknowledge(signal_name: str) -> None:
    # Not through sys.stderr: the signal may have come while something was written there.
    os.write(2, f"\n{signal_name}: stopping with a checkpoint; a second signal ends the run at once\n".encode())


def _new(data: Path | None, preset: str | None, config: Path | None, overrides: tuple[str, ...]) -> TrainConfig:
    from ..pipeline.dataset import Dataset
    from ..trainer.config import load_config
    from ..trainer.parts import resolve

    settings = load_config(_asked({}, data, preset, config, overrides))
    if not settings.data.path:
        raise click.UsageError("no dataset: give --data, the directory that `thermopile convert` wrote")
    return resolve(settings, Dataset(Path(settings.data.path)))


def _resumed(run: RunDirectory, data: Path | None, preset: str | None, config: Path | None,
             overrides: tuple[str, ...]) -> TrainConfig:  # fmt: skip
    """The run's own settings, with what may change; anything else that was asked for is refused by name."""
    from ..pipeline.dataset import Dataset
    from ..trainer.config import differences, load_config, to_tree
    from ..trainer.errors import ConfigError
    from ..trainer.parts import resolve

    recorded = run.config()
    asked = load_config(_asked(to_tree(recorded), data, preset, config, overrides))
    asked = resolve(asked, Dataset(Path(asked.data.path)))
    if changed := differences(recorded, asked):
        raise ConfigError(f"{run.path} cannot be resumed with other settings: {'; '.join(changed)}. "
                          "Leave them out, or start a new run with another --out.")  # fmt: skip
    return asked


def _asked(tree: dict[str, Any], data: Path | None, preset: str | None, config: Path | None,
           overrides: tuple[str, ...]) -> dict[str, Any]:  # fmt: skip
    from ..trainer.config import apply_overrides, merge, read_preset, read_toml

    if preset is not None:
        merge(tree, read_preset(preset))
    if config is not None:
        merge(tree, read_toml(config))
    apply_overrides(tree, overrides)
    if data is not None:
        merge(tree, {"data": {"path": str(data.resolve())}})
    return tree


def _words(report: StepReport) -> str:
    tau = "" if report.tau_mean is None else f"tau {report.tau_mean:.4f}  "
    return (
        f"loss {report.loss:.4f}  {tau}{report.samples_per_second:,.0f} samples/s  "
        f"data wait {report.data_wait:.0%}  store wait {report.store_wait:.0%}"
    )
