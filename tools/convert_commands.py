"""`thermopile convert`: a command for each kind of source, and `check`. Their help waits for nothing that converts."""

import json
import sys
from contextlib import nullcontext, redirect_stdout
from typing import Any

import click
from click.core import ParameterSource

from ..pipeline.dataset.index import read_index
from ..storage.place import Place
from ..trainer.plugins import installed
from .arguments import ANY_PLACE, DATASET, TARS
from .convert_options import ConvertOptions, options_of
from .convert_sources import KINDS, Kind, users_kind
from .printing import plain_text
from .progress import progress_bar

MAX_OF_A_KIND = 10
"""Findings of a kind that `check` prints."""


class _Kinds(click.Group):
    """Also takes `module:name` for a kind, or the entry point of an installed package."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = cmd_name if ":" in cmd_name else "" if cmd_name in self.commands else installed("sources").get(cmd_name)
        return _command(users_kind(own)) if own else super().get_command(ctx, cmd_name)


@click.group(
    cls=_Kinds,
    epilog="\b\nExamples:\n"
    "  thermopile convert glyphs data/glyphs\n"
    "  thermopile convert folder ~/pictures data/pictures --max-size 256\n"
    "  thermopile convert webdataset cc12m/*.tar data/cc12m --resume\n"
    "  thermopile convert my_records:Records ~/records data/records\n"
    "  thermopile convert check data/pictures",
)
def command() -> None:
    """Convert a source to a dataset directory, or check one.

    Samples that cannot be read are left out and listed in OUT/errors.jsonl. Use --resume to continue an interrupted
    conversion.
    """


def _command(kind: Kind) -> click.Command:
    def converted(out: Place, seed: int, src: Any = None, **values: Any) -> None:
        from .convert import run

        context = click.get_current_context()
        given = {name for name in values if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
        own = {name: values.pop(name) for option in kind.options if (name := option.name)}
        asked = ConvertOptions.of({"seed": seed, "given": given} | values)
        try:
            with redirect_stdout(sys.stderr) if asked.as_json else nullcontext():
                results = run(kind, seed if kind.src is None else src, own, out, asked)
        except Exception as error:
            if kind.is_users:  # whose code may raise anything
                error.add_note(f"raised while {kind.name} was read")
            raise
        if asked.as_json:
            click.echo(json.dumps({"datasets": results}))

    src = [click.Argument(["src"], type=kind.src, nargs=-1 if kind.many else 1, required=True)] if kind.src else []
    return click.Command(
        kind.name,
        params=[*src, click.Argument(["out"], type=ANY_PLACE), *kind.options, *options_of(kind)],
        callback=converted,
        help=kind.help,
        epilog=f"\b\nExample:\n  thermopile convert {kind.name} {kind.example}",
    )


for _kind in KINDS:
    command.add_command(_command(_kind))


@command.command(
    short_help="Check that a dataset is sound.",
    epilog="\b\nExamples:\n"
    "  thermopile convert check data/pictures\n"
    "  thermopile convert check data/pictures --json\n\n"
    "Exit codes: 0 sound, 1 not sound or not found, 2 wrong usage.",
)
@click.argument("dataset", type=DATASET)
@TARS
@click.option("--workers", type=click.IntRange(1), help="Threads. Default: one per core.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
@click.pass_context
def check(context: click.Context, dataset: Place, tars: Place | None, workers: int | None, as_json: bool) -> None:
    """Check that DATASET is sound: read every byte and decode every picture.

    Compares shards with their digests, tables with the FFCV files, pictures with their recorded sizes and tokens with
    the captions. Ids must be dense, and no source sample may occur twice.
    """
    samples = read_index(dataset).n
    from ..pipeline.conversion.check import check_dataset  # late, because it imports numba
    from .convert_splits import samples as samples_in_words

    with progress_bar(f"checking {dataset.name}", samples) as bar:
        findings = list(check_dataset(dataset, tars=tars, workers=workers, on_progress=bar.update))
    if as_json:
        found = [finding._asdict() for finding in findings]
        click.echo(json.dumps({"dataset": str(dataset), "samples": samples, "sound": not found, "findings": found}))
    elif not findings:
        click.echo(f"{dataset} is sound: {samples_in_words(samples)}")
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
