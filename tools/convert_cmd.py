"""`thermopile convert`: a source of samples → a dataset directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .progress import progress_bar

if TYPE_CHECKING:
    from ..pipeline.convert import ConvertSettings, Summary
    from ..pipeline.sources import Source

_PATH = click.Path(path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group(
    epilog="\b\nExamples:\n"
    "  thermopile convert glyphs data/glyphs\n"
    "  thermopile convert folder ~/pictures data/pictures --max-size 256"
)
def convert() -> None:
    """Write a dataset directory that the loaders read."""


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every source has."""
    for option in (
        click.option("--overwrite", is_flag=True, help="Replace OUT where it is a dataset."),
        click.option("--workers", type=click.IntRange(1), help="Processes; one per core by default."),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same dataset."),
    ):
        command = option(command)
    return command


@convert.command(epilog="\b\nExample:\n  thermopile convert glyphs data/glyphs   # and data/glyphs-test")
@click.argument("out", type=_PATH)
@_common
def glyphs(out: Path, seed: int, workers: int | None, overwrite: bool) -> None:
    """The embedded example: 100 characters, class sizes falling from 500 to 5, with captions; no download.

    Also writes OUT-test, with 20 samples of every class.
    """
    from ..pipeline.convert import ConvertSettings, refuse_existing
    from ..pipeline.dataset import TOKENIZER_FILE
    from ..pipeline.glyphs import GlyphSource

    refuse_existing(out, overwrite)
    test = out.with_name(f"{out.name}-test")
    refuse_existing(test, overwrite)
    settings = ConvertSettings(seed=seed)
    _convert(GlyphSource(seed), out, settings, workers, overwrite)
    _convert(GlyphSource(seed, test=True), test, settings, workers, overwrite, tokenizer_from=out / TOKENIZER_FILE)


@convert.command(epilog="\b\nExample:\n  thermopile convert folder ~/pictures data/pictures")
@click.argument("source", metavar="SRC", type=_FOLDER)
@click.argument("out", type=_PATH)
@_common
@click.option("--max-size", type=click.IntRange(8), default=512, show_default=True,
              help="Reduce pictures whose short side is longer, in pixels.")  # fmt: skip
@click.option("--quality", type=click.IntRange(1, 100), default=90, show_default=True,
              help="JPEG quality of pictures that must be encoded again.")  # fmt: skip
def folder(
    source: Path, out: Path, seed: int, workers: int | None, overwrite: bool, max_size: int, quality: int
) -> None:
    """A folder of pictures, nested or flat; the first sub-folder below SRC is a picture's class.

    Pictures that cannot be read are left out and listed in OUT/errors.jsonl.
    """
    from ..pipeline.convert import ConvertSettings, refuse_existing
    from ..pipeline.dataset import ImagePolicy
    from ..pipeline.folder import FolderSource

    if source.resolve().is_relative_to(out.resolve()):
        raise click.UsageError(f"OUT {out} holds the pictures to convert; choose another directory")
    refuse_existing(out, overwrite)
    settings = ConvertSettings(seed=seed, image=ImagePolicy(max_size=max_size, quality=quality))
    _convert(FolderSource(source), out, settings, workers, overwrite)


def _convert(source: Source, out: Path, settings: ConvertSettings, workers: int | None, overwrite: bool,
             tokenizer_from: Path | None = None) -> None:  # fmt: skip
    from ..pipeline.convert import convert as convert_source

    with progress_bar(f"converting {out.name}", len(source)) as bar:
        summary = convert_source(
            source, out, settings,
            workers=workers, overwrite=overwrite, tokenizer_from=tokenizer_from, on_progress=bar.update,
        )  # fmt: skip
    click.echo(_summary_line(summary))


def _summary_line(summary: Summary) -> str:
    from ..pipeline.dataset import ERRORS_FILE

    shards = "1 shard" if summary.shards == 1 else f"{summary.shards} shards"
    line = f"{summary.path}: {summary.samples:,} samples in {shards}, {summary.seconds:.1f} s"
    if summary.left_out:
        line += f"; {summary.left_out:,} left out, see {summary.path / ERRORS_FILE}"
    return line
