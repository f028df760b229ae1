"""The options of `thermopile train`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from ..storage.place import Place, Places
from ..trainer.config import data_at, settings_named
from ..trainer.config.layers import Layers, from_overrides
from .arguments import ANY_PLACE, TARS_HELP, flag

COMMAND_LINE = "--set"
ELSEWHERE = {
    "accum-freq": "--set micro_batch=SAMPLES, which gives the same gradients",
    "grad-checkpointing": "--set model.activation_checkpointing=true",
    "lock-image": "--set model.image.locked=true",
    "lock-text": "--set model.text.locked=true",
    "lr-scheduler": "--set optimizer.lr_min=VALUE: the schedule is a cosine after a linear warm-up",
    "method": "--set objective.name=NAME, such as simclr (docs/objectives.md)",
    "model": "--set model.image.name=hf:vit-b (or hf:resnet-50, or hf:/path/to/model), and for pairs "
    "--set model.text.name=hf:clip-text",
    "name": "--out RUN",
    "pretrained": "--set model.image.name=hf:/path/to/model, a directory from transformers' save_pretrained",
    "report-to": "--set trackers='[\"wandb\"]', or tensorboard",
    "save-frequency": "--set checkpoint.every_minutes=MINUTES or --set checkpoint.every_steps=STEPS",
    "temperature": "--set objective.tau=VALUE, or objective.tau_init where it is learned",
    "train-data": "--data, a directory that `thermopile convert` has written",
    "val-data": "--set evaluation.test=DATASET",
    "warmup": "--set optimizer.warmup=STEPS",
    "wd": "--set optimizer.weight_decay=VALUE",
}
"""Options of open_clip, solo-learn and lightly-train -> what does the same here (docs/coming_from.md)."""


class TrainCommand(click.Command):
    """Explains how to pass a setting that was given as an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if meant := ELSEWHERE.get(error.option_name.lstrip("-").replace("_", "-")):
                raise click.UsageError(f"No such option: {error.option_name}. Did you mean {meant}?", ctx) from None
            if keys := settings_named(error.option_name):
                known = " or ".join(f"--set {key}=VALUE" for key in keys)
                raise click.UsageError(f"No such option: {error.option_name}. It is a setting: {known}", ctx) from None
            raise


@dataclass(frozen=True)
class TrainOptions:
    """The options of `thermopile train`."""

    data: tuple[Place, ...] = ()
    tars: Place | None = None
    shares: tuple[int, ...] = ()
    out: Place | None = None
    preset: str | None = None
    config_file: Place | None = None
    overrides: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The same as a tree."""
    steps: int | None = None
    init_from: str | None = None
    grow: bool = False
    select: Path | None = None
    weights: Path | None = None
    without: Path | None = None
    on_nan: str | None = None
    resume: bool = False
    allowed: tuple[str, ...] = ()
    accept_config: bool = False
    allow_code: bool = False
    dry_run: bool = False
    timed: bool = False
    print_config: bool = False


def _of_file(name: str, help: str) -> click.Option:
    return click.Option([f"--{name}"], type=click.Path(path_type=Path), metavar="FILE", help=help)


def add_typed(
    layers: Layers, overrides: Sequence[str], data: Places | None, files: Mapping[str, Place | Path | None]
) -> None:
    """Add the settings of the options --set, --data, and those named as settings of `data` that are files."""
    layers.add(from_overrides(overrides), COMMAND_LINE)
    if data:
        layers.add({"data": data_at(data)}, "--data")
    for name, path in files.items():
        if path is not None:
            layers.add({"data": {name: str(path.resolve())}}, f"--{name}")


OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--data"],
        type=ANY_PLACE,
        multiple=True,
        help="The dataset: a directory, or an address such as s3://bucket/cc12m. Repeat it to mix directories.",
    ),
    click.Option(["--tars"], type=ANY_PLACE, metavar="ROOT", help=TARS_HELP),
    click.Option(
        ["--share", "shares"],
        type=click.IntRange(1),
        multiple=True,
        help="Share of a batch of each --data, such as --share 2 --share 1.",
    ),
    click.Option(
        ["--out"], type=ANY_PLACE, help="The run directory, or s3://BUCKET/PATH; optional with --print-config."
    ),
    click.Option(["--preset"], help="Start from these named settings; an unknown name lists the presets."),
    click.Option(["--config", "config_file"], type=ANY_PLACE, help="A TOML file of settings."),
    click.Option(["--set", "overrides"], multiple=True, metavar="KEY=VALUE", help="Change one setting. Repeatable."),
    click.Option(["--steps"], type=click.IntRange(1), help="End after this many steps, for example to try a command."),
    click.Option(
        ["--init-from"], metavar="RUN[@step-N]", help="Initialise the encoders from another run's checkpoint."
    ),
    flag("grow", "With --init-from: also begin with its samples' state; --data extends its dataset."),
    _of_file("select", "Train on the samples in this Parquet file's column sample_id."),
    _of_file("weights", "Weigh each sample's loss by this Parquet file's columns sample_id and weight."),
    _of_file("without", "Leave out the samples that this Parquet file names; the others keep their places."),
    click.Option(
        ["--on-nan"],
        type=click.Choice(["stop", "skip"]),
        help="If a loss is not finite: stop the run, or skip the step.",
    ),
    flag("resume", "Resume the run in OUT; start it if there is none."),
    click.Option(
        ["--allow-change", "allowed"],
        multiple=True,
        metavar="KEY",
        help="With --resume: allow this setting, or table of settings, to change. Repeatable.",
    ),
    flag("accept-config", "With --resume: accept your manual edits of OUT/config.toml."),
    flag("allow-code", "Allow OUT's settings or --config to import code: `module:name`."),
    flag("dry-run", "Refuse what training would, print what it would need; train and write nothing."),
    flag("timed", "With --dry-run: estimate the time from twenty steps in a temporary directory."),
    flag("print-config", "Print every setting and its origin; train nothing."),
]
