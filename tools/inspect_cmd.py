"""`thermopile inspect`: a run's temperatures in the terminal, as an HTML page, or as rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .own_code import ALLOW

if TYPE_CHECKING:
    from ..trainer.encoders.averaging import Weights

LATEST = "latest"


@click.command(
    short_help="Summarise the temperatures of a run.",
    epilog="\b\nExamples:\n"
    "  thermopile inspect runs/cc3m\n"
    "  thermopile inspect runs/cc3m --at step-12000 --against step-4000\n"
    "  thermopile inspect runs/cc3m --by folder --map\n"
    "  thermopile inspect runs/cc3m --sample 1204 77\n"
    "  thermopile inspect runs/cc3m --sample 1204 --neighbours 20\n"
    "  thermopile inspect runs/cc3m --duplicates\n"
    "  thermopile inspect runs/cc3m --export rows.parquet",
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("more_ids", type=click.IntRange(min=0), nargs=-1, metavar="[MORE IDS]...")
@click.option("--at", default=LATEST, show_default=True, metavar="TAG|ID", help="The snapshot to inspect.")
@click.option(
    "--against", metavar="TAG|ID", help="Compare with this snapshot: how far tau moved, and for which samples most."
)
@click.option("--by", multiple=True, default=("group",), metavar="COLUMN", show_default="group, the class",
              help="Group by a column of the samples table, or by `folder`. Repeatable.")  # fmt: skip
@click.option("--map", "with_map", is_flag=True, help="Add a t-SNE map of the encoders' embeddings.")
@click.option("--weights", type=click.Choice(["averaged", "raw"]), show_default="averaged, where the run has them",
              help="Encoders of --map, --neighbours, --duplicates: averaged weights (model.ema), or not.")  # fmt: skip
@click.option("--sample", "ids", type=click.IntRange(min=0), multiple=True, metavar="ID [ID…]",
              help="Show everything about these samples instead; RUN comes first.")  # fmt: skip
@click.option("--neighbours", type=click.IntRange(1, 100), metavar="K",
              help="With --sample: add the K nearest pictures and captions, and the K hardest negatives.")  # fmt: skip
@click.option("--duplicates", is_flag=True,
              help="Look for duplicates instead: write RUN/report/duplicates.parquet and duplicates.html.")  # fmt: skip
@click.option("--export", "rows_file", type=click.Path(path_type=Path), metavar="FILE.parquet|csv",
              help="Write one row per sample instead.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Let --export replace an existing file.")
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="New path of the run's dataset, if it was moved.")  # fmt: skip
@click.option("--to", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIRECTORY",
              help="Directory of the page. Default: RUN/report.")  # fmt: skip
@ALLOW
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object and write no page.")
@click.pass_context
def inspect(
    context: click.Context, run: Path, more_ids: tuple[int, ...], ids: tuple[int, ...], neighbours: int | None,
    duplicates: bool, rows_file: Path | None, at: str, against: str | None, by: tuple[str, ...], with_map: bool,
    weights: Weights | None, overwrite: bool, data: Path | None, to: Path | None, allow_code: bool, as_json: bool,
) -> None:  # fmt: skip
    """Summarise the temperatures of RUN and write RUN/report/report.html; with --json, only print.

    Works while the run trains: reads the latest snapshot and changes nothing else. Needs no GPU.
    """
    from . import inspecting

    if more_ids and not ids:
        raise click.UsageError(f"unexpected argument {more_ids[0]}; sample ids come after --sample")
    if neighbours and not ids:
        raise click.UsageError("--neighbours needs samples: --sample ID --neighbours K")
    if as_json and not (neighbours or duplicates):
        _refuse(context, "--json", "to")
    if rows_file:
        _refuse(
            context,
            "--export",
            "ids",
            "duplicates",
            "against",
            "by",
            "with_map",
            "weights",
            "allow_code",
            "to",
            "as_json",
        )
        inspecting.export(run, rows_file, at, data, overwrite)
    elif duplicates:
        _refuse(context, "--duplicates", "ids", "against", "by", "with_map", "overwrite")
        inspecting.report_duplicates(run, at, weights, allow_code, data, to, as_json)
    elif ids:
        _refuse(context, "--sample", "against", "by", "with_map", "overwrite")
        if not neighbours:
            _refuse(context, "--sample without --neighbours", "weights", "allow_code")
        inspecting.print_samples(run, (*ids, *more_ids), at, data, to, as_json, neighbours, weights, allow_code)
    else:
        _refuse(context, "a report", "overwrite")
        if not with_map:
            _refuse(context, "a report without --map", "weights", "allow_code")
        inspecting.report(run, at, against, tuple(dict.fromkeys(by)), with_map, weights, allow_code, data, to, as_json)


def _refuse(context: click.Context, what: str, *names: str) -> None:
    """Refuse options that would have no effect."""
    given = {name for name in names if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    if extra := [option.opts[0] for option in context.command.params if option.name in given]:
        raise click.UsageError(f"{', '.join(extra)} has no effect with {what}; leave out one of them")
