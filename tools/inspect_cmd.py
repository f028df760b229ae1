"""`thermopile inspect`: a run's temperatures in the terminal, as an HTML page, or as rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ..storage.place import Place
from .dataset_path import DatasetPath
from .own_code import ALLOW
from .run_place import RUN

if TYPE_CHECKING:
    from ..trainer.encoders.averaging import Weights

LATEST = "latest"
_OPTIONS = {
    "--export": ["rows_file", "overwrite", "suspects"],
    "--serve": ["serves", "port", "neighbours", "to"],
    "--duplicates": ["duplicates", "to", "as_json"],
    "--sample": ["ids", "neighbours", "to", "as_json"],
    "a report": ["against", "by", "with_map", "suspects", "to", "as_json"],
}
"""What is shown -> options that have an effect on it, besides those of all."""


@click.command(
    short_help="Summarise the temperatures of a run.",
    epilog="\b\nExamples:\n"
    "  thermopile inspect runs/cc3m\n"
    "  thermopile inspect runs/cc3m --at step-12000 --against step-4000\n"
    "  thermopile inspect runs/cc3m --by folder --map\n"
    "  thermopile inspect runs/cc3m --confirm 5000\n"
    "  thermopile inspect runs/cc3m --sample 1204 77\n"
    "  thermopile inspect runs/cc3m --sample 1204 --neighbours 20\n"
    "  thermopile inspect runs/cc3m --duplicates\n"
    "  thermopile inspect runs/cc3m --serve\n"
    "  thermopile inspect runs/cc3m --serve --neighbours 20\n"
    "  thermopile inspect runs/cc3m --export rows.parquet\n"
    "  thermopile inspect runs/cc3m-tempnet --data data/cc12m",
)
@RUN
@click.argument("more_ids", type=click.IntRange(min=0), nargs=-1, metavar="[MORE IDS]...")
@click.option("--at", default=LATEST, show_default=True, metavar="TAG|ID", help="The snapshot to inspect.")
@click.option(
    "--against", metavar="TAG|ID", help="Compare with this snapshot: how far tau moved, and for which samples most."
)
@click.option("--by", multiple=True, default=("group",), metavar="COLUMN", show_default="group, the class",
              help="Group by a column of the samples table, or by `folder`. Repeatable.")  # fmt: skip
@click.option("--map", "with_map", is_flag=True, help="Add a t-SNE map of the encoders' embeddings.")
@click.option("--confirm", "suspects", type=click.IntRange(1), is_flag=False, flag_value=20_000, default=None,
              metavar="[N]", help="Decide the kinds of the N most suspicious samples (20,000 without a number) by a "
              "forward pass of the encoders.")  # fmt: skip
@click.option("--weights", type=click.Choice(["averaged", "raw"]), show_default="averaged, where the run has them",
              help="Weights of the encoders, where needed: the moving average (model.ema), or not.")  # fmt: skip
@click.option("--sample", "ids", type=click.IntRange(min=0), multiple=True, metavar="ID [ID…]",
              help="Show everything about these samples instead; RUN comes first.")  # fmt: skip
@click.option("--neighbours", type=click.IntRange(1, 100), metavar="K",
              help="With --sample or --serve: add the K nearest pictures and captions, and the K hardest negatives, by "
              "features of all samples, which are made once.")  # fmt: skip
@click.option("--duplicates", is_flag=True,
              help="Look for duplicates instead: write RUN/report/duplicates.parquet and duplicates.html.")  # fmt: skip
@click.option("--export", "rows_file", type=click.Path(path_type=Path), metavar="FILE.parquet|csv",
              help="Write one row per sample instead.")  # fmt: skip
@click.option("--serve", "serves", is_flag=True, help="Serve a page of all samples to this machine's browser instead: "
              "search, page through, select.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="a free one", help="Port of --serve.")
@click.option("--overwrite", is_flag=True, help="Let --export replace an existing file.")
@click.option("--data", type=DatasetPath(),
              help="New path of the run's dataset, if it was moved; or another dataset, for which a run of tempnet "
                   "predicts temperatures.")  # fmt: skip
@click.option("--to", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIRECTORY",
              help="Directory of the page. Default: RUN/report.")  # fmt: skip
@ALLOW
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object and write no page.")
@click.pass_context
def inspect(
    context: click.Context, run: Place, more_ids: tuple[int, ...], ids: tuple[int, ...], neighbours: int | None,
    duplicates: bool, rows_file: Path | None, serves: bool, port: int, at: str, against: str | None,
    by: tuple[str, ...], with_map: bool, suspects: int | None, weights: Weights | None, overwrite: bool,
    data: Place | None, to: Path | None, allow_code: bool, as_json: bool,
) -> None:  # fmt: skip
    """Summarise the temperatures of RUN and write RUN/report/report.html; with --json, only print.

    Works while the run trains: reads the latest snapshot and changes nothing else. Needs no GPU.
    """
    from . import inspecting

    if more_ids and not ids:
        raise click.UsageError(f"unexpected argument {more_ids[0]}; sample ids come after --sample")
    if neighbours and not (ids or serves):
        raise click.UsageError("--neighbours needs samples: --sample ID --neighbours K, or --serve --neighbours K")
    mode = next((mode for mode, asked in (("--export", rows_file), ("--serve", serves), ("--duplicates", duplicates),
                                          ("--sample", ids)) if asked), "a report")  # fmt: skip
    used = {"run", "more_ids", "at", "data", *_OPTIONS[mode]}
    if with_map or suspects or neighbours or duplicates:
        used |= {"weights", "allow_code"}
    if data:  # whose temperatures may be predicted, by encoders of one's own
        used.add("allow_code")
    if as_json and not (neighbours or duplicates):
        used -= {"to"}
    _refuse_others(context, mode, used)
    suspects = suspects or 0
    if rows_file:
        inspecting.write_rows(run, rows_file, at, data, overwrite, suspects, weights, allow_code)
    elif serves:
        inspecting.serve(run, at, data, to, port, neighbours, weights, allow_code)
    elif duplicates:
        inspecting.report_duplicates(run, at, weights, allow_code, data, to, as_json)
    elif ids:
        inspecting.print_samples(run, (*ids, *more_ids), at, data, to, as_json, neighbours, weights, allow_code)
    else:
        by = tuple(dict.fromkeys(by))
        inspecting.report(run, at, against, by, with_map, suspects, weights, allow_code, data, to, as_json)


def _refuse_others(context: click.Context, mode: str, used: set[str]) -> None:
    """Refuse options that would have no effect."""
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if extra := [option for option in context.command.params if option.name in given - used]:
        names, beside = ", ".join(option.opts[0] for option in extra), mode
        if "as_json" in given & used and extra[0].name == "to":
            beside = "--json"
        elif {option.name for option in extra} <= {"weights", "allow_code"}:
            beside = f"{mode} that needs no encoders"
        raise click.UsageError(f"{names} has no effect with {beside}; leave out one of them")
