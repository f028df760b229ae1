"""The source kinds of `thermopile convert`; add a new one to KINDS. A user's own is `module:name`."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..pipeline.sources import HUB
from ..storage.bucket import is_address
from ..storage.local import LocalPath
from .arguments import PlaceType, defaulting, flag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..pipeline.sources import Source


KIND_OF_SUFFIX = {".csv": "csv", ".tsv": "csv", ".json": "karpathy", ".tar": "webdataset", ".parquet": "parquet"}
KIND_OF_SUFFIX |= {".npy": "arrays", ".npz": "arrays"}
"""What a file's name ends with -> the kind that reads it, unless one is named; all else is a folder."""


class Kind(NamedTuple):
    """One kind of source and its subcommand."""

    name: str
    help: str
    example: str
    source: str
    """`module:class` in pipeline/sources, or a user's own; imported when it is opened."""
    src: click.ParamType[Any] | None
    """Type of SRC; None if the samples are drawn from the seed, with a long tail of their own."""
    options: tuple[click.Option, ...] = ()
    """Specific to this kind; keywords of the class."""
    many: bool = False
    """Whether SRC are files and folders."""
    in_order: bool = False
    """Whether the samples are read in order, as those of tars."""
    captions: bool = False
    own_test: bool = False
    """Whether the class takes `test`, and its own test set becomes OUT-test."""
    is_users: bool = False
    is_dataset: bool = False
    """Whether SRC is a converted dataset, whose pictures and tokenizer are kept as they are."""

    def open(self, src: Any, **options: Any) -> tuple[Source, ...]:
        """Return the source and its own test set, if it has one. May be slow. src: SRC, or the seed to draw from."""
        if self.is_users:
            return (_users_source(self.source, src, **options),)
        module, _, name = self.source.partition(":")
        source = getattr(import_module(f"..pipeline.sources.{module}", __package__), name)
        if self.own_test:
            return source(src, test=False, **options), source(src, test=True, **options)
        return (source(src, **options),)


def _users_source(name: str, src: str | Source, option: Mapping[str, str] | None = None) -> Source:
    """Import and create a source, unless `src` is one. Raises SourceError if it is none."""
    from ..pipeline.errors import SourceError
    from ..trainer.plugins import PluginError, announce_code, load_plugin

    if isinstance(src, str):
        announce_code({"the source": name})
    try:
        source: Source = load_plugin(name, name)(src, **(option or {})) if isinstance(src, str) else src
    except PluginError as error:
        raise SourceError(str(error)) from error
    except SourceError:
        raise
    except Exception as error:  # a user's code may raise anything
        what = f"{name} cannot be created with SRC {src!r} and options {option}"
        raise SourceError(f"{what}: {type(error).__name__}: {error}") from error
    from ..pipeline.sources import Source

    own = [part for part in _OF_A_SOURCE if getattr(type(source), part, None) is getattr(Source, part)]
    if missing := ([*_OF_A_SOURCE] if not isinstance(source, Source) else own):
        raise SourceError(f"{name} lacks {', '.join(missing)}; derive it from thermopile.Source")
    if (mode := getattr(source, "mode", None)) not in ("images", "pairs"):
        raise SourceError(f"{name} has mode = {mode!r}; it must be 'images' or 'pairs'")
    return source


class _LocalPath(click.Path):
    """Say that a path is needed of an address, and what quoted braces lack; click would say that it does not exist."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and is_address(value):
            self.fail(f"{value} is an address, and this takes local paths only; download it first", param, ctx)
        if isinstance(value, str) and {*value} & {*"{*?["} and not os.path.exists(value):
            self.fail(f"{value} does not exist; leave out its quotes, so that the shell expands it", param, ctx)
        return super().convert(value, param, ctx)


_LOCAL_FILE = _LocalPath(exists=True, dir_okay=False, path_type=LocalPath)
_LOCAL = _LocalPath(exists=True, path_type=LocalPath)
_FOLDER = PlaceType(click.Path(exists=True, file_okay=False, path_type=LocalPath))
_FILE = PlaceType(_LOCAL_FILE)
_EITHER = PlaceType(_LOCAL)
_ROOT = click.Option(["--root"], type=_FOLDER, help="Base folder of relative paths. Default: the folder of SRC.")

_OF_A_SOURCE = ("__len__", "__getitem__", "uri", "key", "describe")


def _to_options(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    given = [value.partition("=") for value in values]
    if wrong := [value for value, (key, equals, _) in zip(values, given, strict=True) if not (key and equals)]:
        raise click.BadParameter(f"{wrong[0]!r} is not KEY=VALUE")
    return {key: text for key, _, text in given}


def users_kind(name: str) -> Kind:
    """Return the kind for a user's own source, `module:name`. Imports nothing."""
    return Kind(
        name,
        "Convert a source of your own: a class derived from thermopile.Source that is called with SRC and the options.",
        "~/records data/records --option split=train",
        name,
        click.STRING,
        (
            click.Option(
                ["--option"],
                multiple=True,
                metavar="KEY=VALUE",
                callback=_to_options,
                help="Keyword of the class, as a string. Repeatable.",
            ),
        ),
        captions=True,
        is_users=True,
    )


def kind_named(name: str, src: str) -> Kind:
    """Return a kind by name; without one, the kind that reads what SRC ends with."""
    name = name or KIND_OF_SUFFIX.get(os.path.splitext(src)[1], "parquet" if src.startswith(HUB) else "folder")
    if found := [kind for kind in KINDS if kind.name == name]:
        return found[0]
    raise click.UsageError(f"no kind of source is called {name!r}; there are {', '.join(kind.name for kind in KINDS)}")


def _part(name: str, default: str | None, help: str) -> click.Option:
    return click.Option(
        [f"--{name}"], default=default, show_default=True, callback=lambda *given: given[2] or None, help=help
    )


def _share(name: str, help: str) -> click.Option:
    return defaulting(name, click.FloatRange(0, 1), 0.0, help)


KINDS = (
    Kind(
        "folder",
        "Convert a folder of pictures, nested or flat. The first folder below SRC is a picture's class.",
        "~/pictures data/pictures --holdout 0.05",
        "folder:FolderSource",
        _FOLDER,
        (
            _part(
                "caption",
                None,
                "Suffix of files with captions, such as txt: x.txt beside x.jpg, one a line; or metadata[:COLUMN]: of "
                "metadata.csv or .jsonl.",
            ),
        ),
        captions=True,
    ),
    Kind(
        "cifar",
        "Convert CIFAR-10 or -100, python or binary: the downloaded archive or its folder. The test batch is OUT-test.",
        "cifar-100-python.tar.gz data/cifar100-lt --longtail 100",
        "cifar:CifarSource",
        _LOCAL,
        (flag("superclasses", "Use CIFAR-100's 20 superclasses in place of its 100 classes."),),
        own_test=True,
    ),
    Kind(
        "csv",
        "Convert a csv or tsv file that lists image paths and captions.",
        "cc3m/train.tsv data/cc3m --vocab-size 16384 --context-length 64",
        "csv_source:CsvSource",
        _FILE,
        (
            _part("image", "filepath", "Column with the picture's path."),
            _part("caption", "title", "Column with the caption; empty for images only."),
            _part("group", None, "Column with the class, if any."),
            click.Option(
                ["--separator"], help="Column separator. Default: a tab for .tsv or a header with a tab, else a comma."
            ),
            click.Option(
                ["--quoting"],
                type=click.Choice(["csv", "none"]),
                help="Whether quotes enclose texts (csv) or belong to them (none). Default: decided by the whole file.",
            ),
            _ROOT,
        ),
        captions=True,
    ),
    Kind(
        "karpathy",
        "Convert a list in Karpathy's json, such as dataset_coco.json. Its split test is OUT-test.",
        "dataset_flickr30k.json data/flickr30k --root flickr30k-images",
        "karpathy:KarpathySource",
        _FILE,
        (
            _part("split", "train,restval", "Splits to convert, separated by commas."),
            _part("test-split", "test", "Splits that become OUT-test."),
            _ROOT,
        ),
        captions=True,
        own_test=True,
    ),
    Kind(
        "webdataset",
        "Convert WebDataset tar shards, such as img2dataset writes: files, or folders of them.",
        "cc12m/*.tar data/cc12m --caption json:caption",
        "webdataset:WebDatasetSource",
        _EITHER,
        (
            _part("image", "jpg;jpeg;png;webp", "Suffixes of pictures; the first that a sample has is used."),
            _part("caption", "txt", "Suffix of the captions, one per line, or json:FIELD; empty for images only."),
            _part("group", "cls", "Suffix of the class, or json:FIELD."),
            defaulting(
                "key-by",
                click.Choice(["first-dot", "last-dot"]),
                "first-dot",
                "Where a member's key ends: WebDataset's first dot of its name, or the last one.",
            ),
            flag("in-place", "Leave pictures in the tars, where training reads them; OUT has those that must change."),
        ),
        many=True,
        in_order=True,
        captions=True,
    ),
    Kind(
        "parquet",
        "Convert Parquet files with embedded pictures, such as Hugging Face datasets: files, or folders of them, or "
        "hf://datasets/ORG/NAME[@REVISION][/PATH] from the hub.",
        "food101/data/train-*.parquet data/food101 --holdout 50",
        "parquet:ParquetSource",
        PlaceType(_LOCAL, HUB),
        (
            _part("image", "image;jpg;jpeg;png;webp;img", "Column with the picture; the first that exists is used."),
            _part(
                "caption",
                "caption;captions;text;TEXT;prompt;sentences",
                "Column with the caption or captions; images only if empty or not found.",
            ),
            _part("group", "label;cls", "Column with the class; the first that exists is used."),
        ),
        many=True,
        captions=True,
    ),
    Kind(
        "arrays",
        "Convert pictures, uint8, and classes, if any: an .npz, or an .npy or idx file (MNIST's, also .gz) of each.",
        "images.npy labels.npy data/images",
        "arrays:ArraysSource",
        _FILE,
        (
            _part("image", "images;x;x_train;train_images;arr_0", "Pictures in an .npz; the first name that exists."),
            _part("group", "labels;y;y_train;train_labels;arr_1", "Classes in an .npz; the first name that exists."),
        ),
        many=True,
    ),
    Kind(
        "dataset",
        "Copy the selected samples of a converted dataset, JPEGs, captions and tokenizer unchanged. They get new ids.",
        "data/cc12m data/cc12m-kept --select kept.parquet",
        "dataset_source:DatasetSource",
        _FOLDER,
        (
            click.Option(
                ["--select"],
                type=_LOCAL_FILE,
                required=True,
                metavar="FILE",
                help="Parquet file whose column sample_id has the ids to copy.",
            ),
        ),
        is_dataset=True,
    ),
    Kind(
        "glyphs",
        "Draw the embedded example: 100 characters with captions, class sizes from 500 down to 5; no download. "
        "OUT-test has 20 samples per class.",
        "data/glyphs   # and data/glyphs-test",
        "glyphs:GlyphSource",
        None,
        (
            _share("swap", "Give this share of the samples the caption of a sample of another class."),
            _share("duplicate", "Add a near-duplicate of this share of the samples."),
        ),
        captions=True,
        own_test=True,
    ),
)
