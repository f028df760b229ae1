"""`thermopile convert`: write a dataset directory from a source, and a test set on request; check one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ..storage.place import Place
from .convert_sources import KINDS, Kind, users_kind
from .dataset_path import DatasetPath
from .place_type import ANY_PLACE
from .plain_text import plain_text
from .progress import progress_bar

MAX_OF_A_KIND = 10
"""Findings of a kind that `check` prints."""


class _Kinds(click.Group):
    """Also takes `module:name` for a kind."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(users_kind(cmd_name)) if ":" in cmd_name else super().get_command(ctx, cmd_name)


@click.group(
    cls=_Kinds,
    epilog="\b\nExamples:\n"
    "  thermopile convert glyphs data/glyphs\n"
    "  thermopile convert folder ~/pictures data/pictures --max-size 256\n"
    "  thermopile convert webdataset cc12m/*.tar data/cc12m --resume\n"
    "  thermopile convert my_records:Records ~/records data/records\n"
    "  thermopile convert check data/pictures",
)
def convert() -> None:
    """Convert a source to a dataset directory, or check one.

    Samples that cannot be read are left out and listed in OUT/errors.jsonl. Use --resume to continue an interrupted
    conversion.
    """


def _number_or_share(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is None or 0 < value < 1 or (value >= 1 and value.is_integer()):
        return value
    raise click.BadParameter(f"{value:g} is neither a number of samples nor a fraction between 0 and 1")


def _part_number(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", value)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise click.BadParameter(f"{value!r} is not I/K with I from 1 to K, such as 1/8")
    return int(found[1]), int(found[2])


def _options(kind: Kind) -> Iterator[click.Option]:
    """Yield the options shared by several kinds, named as the parameters of `converting.run`."""
    if not (kind.own_test or kind.is_dataset):
        yield click.Option(["--holdout"], type=float, callback=_number_or_share, metavar="N|FRACTION",
                           help="Hold out this many samples, or fraction, as OUT-test, class-balanced.")  # fmt: skip
    if not (kind.own_test or kind.is_dataset):
        yield click.Option(["--append"], is_flag=True,
                           help="Append the samples to the dataset OUT, with its tokenizer and picture sizes; its own "
                           "samples keep their ids.")  # fmt: skip
    if kind.src and not kind.is_dataset:
        yield click.Option(["--longtail"], type=click.FloatRange(1, min_open=True), metavar="RATIO",
                           help="Cut the classes to an exponential long tail: the first is RATIO times the last. "
                           "Applied after --holdout; samples without a class are kept.")  # fmt: skip
    if kind.captions:
        yield click.Option(["--vocab-size"], type=click.IntRange(300), default=1024, show_default=True,
                           help="Vocabulary size of the tokenizer trained on the captions.")  # fmt: skip
        yield click.Option(["--tokenizer"], type=click.Path(exists=True, dir_okay=False, path_type=Path),
                           help="Use this tokenizer.json instead of training one.")  # fmt: skip
        yield click.Option(["--context-length"], type=click.IntRange(4), default=32, show_default=True,
                           help="Tokens per caption.")  # fmt: skip
    if not kind.is_dataset:
        yield click.Option(["--max-size"], type=click.IntRange(8), default=512, show_default=True,
                           help="Downscale pictures whose short side is longer, in pixels.")  # fmt: skip
        yield click.Option(["--quality"], type=click.IntRange(1, 100), default=90, show_default=True,
                           help="JPEG quality of re-encoded pictures.")  # fmt: skip
    yield click.Option(["--on-error"], type=click.Choice(["skip", "fail"]), default="skip", show_default=True,
                       help="Leave out samples that cannot be used, or fail at the first.")  # fmt: skip
    yield click.Option(["--max-error-rate"], type=click.FloatRange(0, 1), default=0.1, show_default=True,
                       help="Fail if a larger share of the samples cannot be used.")  # fmt: skip
    yield click.Option(["--seed"], type=click.IntRange(0), default=0, show_default=True,
                       help="Seed of the shuffle and of all draws; same seed, same dataset.")  # fmt: skip
    yield click.Option(["--workers"], type=click.IntRange(1), help="Worker processes. Default: one per core.")
    yield click.Option(["--resume"], is_flag=True, help="Continue an interrupted conversion.")
    yield click.Option(["--overwrite"], is_flag=True, help="Replace OUT if it is a dataset.")
    yield click.Option(["--part"], callback=_part_number, metavar="I/K",
                       help="Convert only part I of K, beside other parts, on any machine that shares the files. "
                       "Repeat it after an interruption.")  # fmt: skip
    yield click.Option(["--on"], type=click.Choice(["ray"]),
                       help="Convert on the Ray cluster that RAY_ADDRESS names, or on a local one of --workers cores. "
                       "Repeat it after an interruption.")  # fmt: skip
    yield click.Option(["--finish"], is_flag=True, help="Make the dataset of all parts, once they are converted.")


def _command(kind: Kind) -> click.Command:
    def run(out: Place, seed: int, src: Any = None, **values: Any) -> None:
        from . import converting

        own = {name: values.pop(name) for option in kind.options if (name := option.name)}
        converting.run(kind, seed if kind.src is None else src, own, out, seed=seed, **values)

    many = kind.pattern is not None
    src = [click.Argument(["src"], type=kind.src, nargs=-1 if many else 1, required=True)] if kind.src else []
    out = click.Argument(["out"], type=ANY_PLACE)
    return click.Command(
        kind.name, params=[*src, out, *kind.options, *_options(kind)], callback=run, help=kind.help,
        epilog=f"\b\nExample:\n  thermopile convert {kind.name} {kind.example}",
    )  # fmt: skip


for _kind in KINDS:
    convert.add_command(_command(_kind))


@convert.command(
    short_help="Check that a dataset is sound.",
    epilog="\b\nExamples:\n"
    "  thermopile convert check data/pictures\n"
    "  thermopile convert check data/pictures --json\n\n"
    "Exit codes: 0 sound, 1 not sound or not found, 2 wrong usage.",
)
@click.argument("dataset", type=DatasetPath())
@click.option("--workers", type=click.IntRange(1), help="Threads. Default: one per core.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
@click.pass_context
def check(context: click.Context, dataset: Place, workers: int | None, as_json: bool) -> None:
    """Check that DATASET is sound: read every byte and decode every picture.

    Compares shards with their digests, tables with the FFCV files, pictures with their recorded sizes and tokens with
    the captions. Ids must be dense, and no source sample may occur twice.
    """
    from ..pipeline.dataset_index import read_index

    samples = read_index(dataset).n
    from ..pipeline.conversion.check import check_dataset  # late, because it imports torch

    with progress_bar(f"checking {dataset.name}", samples) as bar:
        findings = list(check_dataset(dataset, workers=workers, on_progress=bar.update))
    if as_json:
        found = [finding._asdict() for finding in findings]
        click.echo(json.dumps({"dataset": str(dataset), "samples": samples, "sound": not found, "findings": found}))
    elif not findings:
        click.echo(f"{dataset} is sound: {samples:,} samples")
    else:
        for kind in dict.fromkeys(finding.kind for finding in findings):
            of_kind = [finding for finding in findings if finding.kind == kind]
            for finding in of_kind[:MAX_OF_A_KIND]:
                click.echo(f"{kind}: {finding.where}: {plain_text(finding.what)}")
            if len(of_kind) > MAX_OF_A_KIND:
                click.echo(f"{kind}: and {len(of_kind) - MAX_OF_A_KIND:,} more")
        click.echo("Not sound. Convert the dataset again, or copy it again from its origin.")
    if findings:
        context.exit(1)
