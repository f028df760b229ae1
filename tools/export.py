"""`thermopile export`: write a run's encoders for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..storage.place import Place, Places
from .arguments import ALLOW, AT, RUN, RUN_DATA, WEIGHTS

if TYPE_CHECKING:
    from ..trainer.config import Weights
    from ..trainer.export import Format


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile export runs/pictures --to models/pictures --format hf\n"
    "  thermopile export runs/glyphs --to models/glyphs --format safetensors --at step-400"
)
@RUN
@click.option("--to", required=True, type=click.Path(path_type=Path), help="The directory to write; must not exist.")
@click.option(
    "--format",
    "format_",
    required=True,
    type=click.Choice(["hf", "timm", "open_clip", "safetensors"]),
    help="hf, timm: one directory per encoder, loaded by transformers or timm. open_clip: one directory for both "
    "towers. safetensors: one file per encoder, for any encoder.",
)
@AT
@WEIGHTS
@RUN_DATA
@ALLOW
def export(
    run: Place, to: Path, format_: Format, at: str, weights: Weights | None, data: Places | None, allow_code: bool
) -> None:
    """Write the encoders of RUN's latest checkpoint into a new directory.

    Works while the run trains and changes nothing.
    """
    from ..trainer.run_directory import RunDirectory

    directory = RunDirectory(run)
    directory.config()  # refuse what is not a run before importing torch
    from ..trainer.export import export_encoders

    for path in export_encoders(directory, to, format_, at=at, data=data, weights=weights, allow_code=allow_code):
        click.echo(path)
