"""`thermopile export`: write a run's encoders for other programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..storage.place import AnyPlace, place_of
from .arguments import ALLOW, AT, RUN, WEIGHTS

if TYPE_CHECKING:
    from ..trainer.config import Weights
    from ..trainer.export import Format


def export(
    run: AnyPlace,
    to: str | os.PathLike[str],
    format: Format,
    *,
    at: str = "latest",
    weights: Weights | None = None,
    allow_code: bool = False,
) -> list[Path]:
    """Write a run's encoders to the new directory `to`, and return its files.

    Arguments are those of `thermopile export`. Raises RunError, ConfigError, OSError.

        >>> [path.name for path in thermopile.export("runs/mine", "models/mine", "safetensors")]
        ['image.safetensors', 'text.safetensors', 'tokenizer.json']
    """
    from ..trainer.run_directory import RunDirectory

    directory = RunDirectory(place_of(run))
    directory.config()  # refuse what is not a run before importing torch
    from ..trainer.export import export_encoders

    return export_encoders(directory, Path(to), format, at=at, weights=weights, allow_code=allow_code)


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile export runs/pictures --to models/pictures --format hf\n"
    "  thermopile export runs/glyphs --to models/glyphs --format safetensors --at step-400"
)
@RUN
@click.option("--to", required=True, type=click.Path(path_type=Path), help="The directory to write; must not exist.")
@click.option(
    "--format",
    required=True,
    type=click.Choice(["hf", "timm", "open_clip", "safetensors"]),
    help="hf, timm: one directory per encoder, loaded by transformers or timm. open_clip: one directory for both "
    "towers. safetensors: one file per encoder, for any encoder.",
)
@AT
@WEIGHTS
@ALLOW
def command(**options: Any) -> None:
    """Write the encoders of RUN's latest checkpoint into a new directory.

    Works while the run trains and changes nothing.
    """
    for path in export(**options):
        click.echo(path)
