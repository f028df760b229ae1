"""The options of `thermopile convert`, whichever kind of source it reads."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import click

from ..pipeline.conversion.plan import ConvertSettings
from ..pipeline.dataset.index import MAX_PIXELS, TOKENIZER_FILE, ImagePolicy
from ..pipeline.dataset.tokenizer import model_context
from ..pipeline.sources.caption_lengths import CONTEXTS
from .arguments import defaulting, flag
from .convert_sources import Kind


@dataclass(frozen=True)
class PartNumber:
    """Every `count`-th shard, beginning with shard `number` - 1."""

    number: int
    """1 … count."""
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True)
class ConvertOptions:
    """The options that several kinds have; a kind without an option has its default."""

    settings: ConvertSettings
    given: Collection[str]
    """Names of options that are not left to their defaults."""
    model: tuple[str, Path] = "", Path()
    """The model whose tokenizer is used, as it was typed, and its folder."""
    workers: int | None = None
    resume: bool = False
    overwrite: bool = False
    part: PartNumber | None = None
    on: str | None = None
    finish: bool = False
    as_json: bool = False
    append: bool = False
    holdout: float | None = None
    longtail: float | None = None
    limit: int | None = None
    dry_run: bool = False

    @property
    def of_captions(self) -> list[str]:
        """Names of the given options that only captions need."""
        return [name for name in ("vocab_size", "tokenizer", "context_length") if name in self.given]

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Return the options, after fetching a model's tokenizer. Vocabulary and context are chosen unless given."""
        image = ImagePolicy(**{name: values.pop(name) for name in ImagePolicy.model_fields if name in values})
        given = {name: values.pop(name) for name in ConvertSettings.model_fields if name in values}
        if (name := str(given.get("tokenizer"))).startswith("hf:"):
            from ..trainer.encoders.hf_hub import snapshot  # late, because it imports torch

            folder = snapshot(name, fetching=True, weights=False) or Path(name[3:]).expanduser()
            values["model"], given["tokenizer"] = (name, folder), _FILE.convert(folder / TOKENIZER_FILE, None, None)
            if (length := model_context(folder)) and length <= CONTEXTS[-1]:
                given["context_length"] = given.get("context_length") or length
        chosen = {name: given.get(name) or 0 for name in ("vocab_size", "context_length")}
        return cls(ConvertSettings(image=image, **given | chosen), **values)


def _number_or_share(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is None or 0 < value < 1 or (value >= 1 and value.is_integer()):
        return value
    raise click.BadParameter(f"{value:g} is neither a number of samples nor a fraction between 0 and 1")


def _part_number(context: click.Context, parameter: click.Parameter, value: str | None) -> PartNumber | None:
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", value)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise click.BadParameter(f"{value!r} is not I/K with I from 1 to K, such as 1/8")
    return PartNumber(int(found[1]), int(found[2]))


_OF_NEW_SAMPLES = (
    click.Option(
        ["--holdout"],
        type=float,
        callback=_number_or_share,
        metavar="N|FRACTION",
        help="Hold out this many samples, or fraction, as OUT-test, class-balanced.",
    ),
    flag("append", "Append samples to the dataset OUT, with its tokenizer and picture sizes; its own keep their ids."),
)
_LONGTAIL = click.Option(
    ["--longtail"],
    type=click.FloatRange(1, min_open=True),
    metavar="RATIO",
    help="Cut the classes to an exponential long tail: the first is RATIO times the last. "
    "Applied after --holdout; samples without a class are kept.",
)


class _TokenizerPath(click.Path):
    """A tokenizer.json, or `hf:` and a directory or a name of the hub with one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if str(value).startswith("hf:") else super().convert(value, param, ctx)


_FILE = _TokenizerPath(exists=True, dir_okay=False, path_type=Path)
_OF_CAPTIONS = (
    click.Option(
        ["--vocab-size"],
        type=click.IntRange(300),
        help="Vocabulary size of the tokenizer trained on the captions. Default: from 1024 to 32768, by their words.",
    ),
    click.Option(
        ["--tokenizer"],
        type=_FILE,
        metavar="FILE|hf:DIR|hf:ORG/NAME",
        help="Use this tokenizer.json instead of training one; of a model's directory, also its context length.",
    ),
    click.Option(
        ["--context-length"],
        type=click.IntRange(4),
        help="Tokens per caption. Default: from 32 to 77, so that at most 1% of the captions are cut.",
    ),
)
_OF_PICTURES = (
    defaulting("max-size", click.IntRange(8), 512, "Downscale pictures whose short side is longer, in pixels."),
    defaulting("quality", click.IntRange(1, 100), 90, "JPEG quality of re-encoded pictures."),
    defaulting("max-pixels", click.IntRange(1), MAX_PIXELS, "Leave out pictures that claim more pixels than this."),
)
_OF_ALL = (
    defaulting("on-error", click.Choice(["skip", "fail"]), "skip", "Leave out unusable samples, or fail at the first."),
    defaulting("max-error-rate", click.FloatRange(0, 1), 0.1, "Fail if a larger share of the samples cannot be used."),
    defaulting("seed", click.IntRange(0), 0, "Seed of the shuffle and of all draws; same seed, same dataset."),
    click.Option(["--workers"], type=click.IntRange(1), help="Worker processes. Default: one per core."),
    click.Option(["--limit"], type=click.IntRange(1), help="Convert this many samples at most, evenly spaced."),
    flag("dry-run", "Try 2,000 samples, or --limit, and say what would be left out; nothing is kept."),
    flag("resume", "Continue an interrupted conversion."),
    flag("overwrite", "Replace OUT if it is a dataset."),
    click.Option(
        ["--part"],
        callback=_part_number,
        metavar="I/K",
        help="Convert only part I of K, beside other parts, on any machine that shares the files. "
        "Repeat it after an interruption.",
    ),
    click.Option(
        ["--on"],
        type=click.Choice(["ray"]),
        help="Convert on the Ray cluster that RAY_ADDRESS names, or on a local one of --workers cores. "
        "Repeat it after an interruption.",
    ),
    flag("finish", "Make the dataset of all parts, once they are converted."),
    click.Option(["--json", "as_json"], is_flag=True, help="Print the summary as one JSON object; the text on stderr."),
)


def options_of(kind: Kind) -> Iterator[click.Option]:
    """Yield the options of a kind, named as the fields of ConvertOptions."""
    if not (kind.own_test or kind.is_dataset):
        yield from _OF_NEW_SAMPLES
    if kind.src and not kind.is_dataset:
        yield _LONGTAIL
    if kind.captions:
        yield from _OF_CAPTIONS
    if not kind.is_dataset:
        yield from _OF_PICTURES
    yield from _OF_ALL
