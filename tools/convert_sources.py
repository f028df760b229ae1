"""The source kinds of `thermopile convert`; add a new one to KINDS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from ..pipeline.sources import Source


class Kind(NamedTuple):
    """One kind of source and its subcommand."""

    name: str
    help: str
    example: str
    open: Callable[..., tuple[Source, ...]]
    """Called with the values of `parameters`; may be slow. Returns the source and, if it has one, its own test set."""
    parameters: tuple[click.Parameter, ...] = ()
    """SRC, if any, and the options specific to this kind."""
    captions: bool = False
    own_test: bool = False
    labelled: bool = True
    """Whether its samples can have classes, so that --longtail applies."""
    drawn: bool = False
    """Whether the samples are generated from the seed; `open` then also takes the seed."""


_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_EITHER = click.Path(exists=True, path_type=Path)


def _option(*names: str, **settings: Any) -> click.Option:
    return click.Option(names, show_default="default" in settings, **settings)


def _none_if_empty(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    return value or None


def _part(name: str, default: str | None, help: str) -> click.Option:
    return _option(f"--{name}", default=default, callback=_none_if_empty, help=help)


def _files_of(given: Sequence[Path], pattern: str) -> list[Path]:
    """Return the given files and those in the given folders, sorted, so the shell's order does not matter."""
    found = {file for path in given for file in (path.rglob(pattern) if path.is_dir() else [path])}
    return sorted(found)


def _open_glyphs(seed: int) -> tuple[Source, ...]:
    from ..pipeline.sources.glyphs import GlyphSource

    return GlyphSource(seed), GlyphSource(seed, test=True)


def _open_folder(src: Path) -> tuple[Source, ...]:
    from ..pipeline.sources.folder import FolderSource

    return (FolderSource(src),)


def _open_cifar(src: Path) -> tuple[Source, ...]:
    from ..pipeline.sources.cifar import CifarSource

    return CifarSource(src, test=False), CifarSource(src, test=True)


def _open_csv(src: Path, **columns: Any) -> tuple[Source, ...]:
    from ..pipeline.sources.csv_source import CsvSource

    return (CsvSource(src, **columns),)


def _open_webdataset(src: Sequence[Path], **members: Any) -> tuple[Source, ...]:
    from ..pipeline.sources.webdataset import WebDatasetSource

    return (WebDatasetSource(_files_of(src, "*.tar"), **members),)


def _open_parquet(src: Sequence[Path], **columns: Any) -> tuple[Source, ...]:
    from ..pipeline.sources.parquet import ParquetSource

    return (ParquetSource(_files_of(src, "*.parquet"), **columns),)


KINDS = (
    Kind(
        "folder",
        "Convert a folder of pictures, nested or flat. The first folder below SRC is a picture's class.",
        "~/pictures data/pictures --holdout 0.05",
        _open_folder,
        (click.Argument(["src"], type=_FOLDER),),
    ),
    Kind(
        "cifar",
        "Convert CIFAR-10 or -100, python or binary: the downloaded archive or its folder. The test batch is OUT-test.",
        "cifar-100-python.tar.gz data/cifar100-lt --longtail 100",
        _open_cifar,
        (click.Argument(["src"], type=_EITHER),),
        own_test=True,
    ),
    Kind(
        "csv",
        "Convert a csv or tsv file that lists image paths and captions.",
        "cc3m/train.tsv data/cc3m --vocab-size 16384 --context-length 64",
        _open_csv,
        (
            click.Argument(["src"], type=_FILE),
            _part("image", "filepath", "Column with the picture's path."),
            _part("caption", "title", "Column with the caption; empty for images only."),
            _part("group", None, "Column with the class, if any."),
            _option(
                "--separator", help="Column separator. Default: a tab for .tsv or if the header has one, else a comma."
            ),
            _option("--root", type=_FOLDER, help="Base folder of relative paths. Default: the folder of SRC."),
        ),
        captions=True,
    ),
    Kind(
        "webdataset",
        "Convert WebDataset tar shards, such as img2dataset writes: files, or folders of them.",
        "cc12m/*.tar data/cc12m --caption json:caption",
        _open_webdataset,
        (
            click.Argument(["src"], nargs=-1, required=True, type=_EITHER),
            _part("image", "jpg;jpeg;png;webp", "Suffixes of pictures; the first that a sample has is used."),
            _part("caption", "txt", "Suffix of the caption, or json:FIELD; empty for images only."),
            _part("group", "cls", "Suffix of the class, or json:FIELD."),
        ),
        captions=True,
    ),
    Kind(
        "parquet",
        "Convert Parquet files with embedded pictures, such as Hugging Face datasets: files, or folders of them.",
        "food101/data/train-*.parquet data/food101 --holdout 50",
        _open_parquet,
        (
            click.Argument(["src"], nargs=-1, required=True, type=_EITHER),
            _part("image", "image;jpg;jpeg;png;webp;img", "Column with the picture; the first that exists is used."),
            _part("caption", "caption;text", "Column with the caption; images only if empty or not found."),
            _part("group", "label;cls", "Column with the class; the first that exists is used."),
        ),
        captions=True,
    ),
    Kind(
        "glyphs",
        "Draw the embedded example: 100 characters with captions, class sizes from 500 down to 5; no download. "
        "OUT-test has 20 samples per class.",
        "data/glyphs   # and data/glyphs-test",
        _open_glyphs,
        captions=True,
        own_test=True,
        labelled=False,
        drawn=True,
    ),
)
