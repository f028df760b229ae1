"""`thermopile train`: start or resume a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .place_type import ANY_PLACE


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
@click.option("--data", type=ANY_PLACE, help="The dataset: a directory, or an address such as s3://bucket/cc12m.")
@click.option("--out", type=ANY_PLACE,
              help="The run directory, or s3://BUCKET/PATH; optional with --print-config.")  # fmt: skip
@click.option("--preset", help="Start from these named settings; an unknown name lists the presets.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="A TOML file of settings.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting. Repeatable.")
@click.option("--init-from", metavar="RUN[@step-N]", help="Initialise the encoders from another run's checkpoint.")
@click.option("--grow", is_flag=True,
              help="With --init-from: also begin with its samples' state; --data extends its dataset.")  # fmt: skip
@click.option("--select", type=click.Path(path_type=Path), metavar="FILE",
              help="Train on the samples in this Parquet file's column sample_id.")  # fmt: skip
@click.option("--weights", type=click.Path(path_type=Path), metavar="FILE",
              help="Weigh each sample's loss by this Parquet file's columns sample_id and weight.")  # fmt: skip
@click.option("--on-nan", type=click.Choice(["stop", "skip"]),
              help="If a loss is not finite: stop the run, or skip the step and continue.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Resume the run in OUT; start it if there is none.")
@click.option("--allow-change", "allowed", multiple=True, metavar="KEY",
              help="With --resume: allow this setting, or table of settings, to change. Repeatable.")  # fmt: skip
@click.option("--accept-config", is_flag=True,
              help="With --resume: accept your manual edits of OUT/config.toml.")  # fmt: skip
@click.option("--allow-code", is_flag=True,
              help="Allow OUT's settings or --config to import code: `module:name`.")  # fmt: skip
@click.option("--print-config", is_flag=True, help="Print every setting and its origin; train nothing.")
def train(**options: Any) -> None:
    """Train encoders with a temperature per sample.

    Later settings override earlier ones: defaults, --preset, --config, --set, --init-from, --on-nan, --data, --select,
    --weights. OUT/config.toml records the result.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 finish the current step, write a checkpoint and exit with code 75. A second
    signal ends the run at once; --resume then starts from the last checkpoint.
    """
    from ..trainer.run.preemption import EXIT_CODE
    from .training import TrainOptions, train

    if not train(TrainOptions(**options)):
        click.get_current_context().exit(EXIT_CODE)
