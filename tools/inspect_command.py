"""`thermopile inspect`: its options, and what has no effect beside what. Their help waits for no analysis."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .arguments import ALLOW, RUN, RUN_DATA, WEIGHTS

_FOR_OTHER = {"run", "at", "data", "rho", "features", "weights", "allow_code", "rows_file", "overwrite", "as_json"}
"""Options that have an effect on a dataset that the run was not trained on."""


def _samples(context: click.Context, option: click.Parameter, value: Any) -> int | None:
    """Return a number of samples, which may be `all` or `none`."""
    words = {None: None, "all": 1 << 40, "none": 0}  # more than any dataset has
    return words[value] if value in words else click.IntRange(1).convert(value, option, context)


@click.command(
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
    "  thermopile inspect runs/cc3m --export rows.parquet",
)
@RUN
@click.argument("more_ids", type=click.IntRange(min=0), nargs=-1, metavar="[MORE IDS]...")
@click.option("--at", default="latest", show_default=True, metavar="TAG|ID", help="The snapshot to inspect.")
@click.option(
    "--against", metavar="TAG|ID", help="Compare with this snapshot: how far tau moved, and for which samples most."
)
@click.option(
    "--by",
    multiple=True,
    default=("group",),
    metavar="COLUMN",
    show_default="group, the class",
    help="Group by a column of the samples table, or by `folder`. Repeatable.",
)
@click.option("--map", "with_map", is_flag=True, help="Add a t-SNE map of the embeddings, by tau and the first --by.")
@click.option(
    "--confirm",
    "suspects",
    type=click.IntRange(1),
    is_flag=False,
    flag_value=20_000,
    default=None,
    metavar="[N]",
    help="Decide the kinds of the N most suspicious samples (20,000 without a number) by a "
    "forward pass of the encoders.",
)
@click.option(
    "--rho",
    type=click.FloatRange(0, min_open=True),
    metavar="RHO",
    help="Solve temperatures at this rho instead of the run's; needed where the objective has none (1 for pairs).",
)
@click.option(
    "--features",
    callback=_samples,
    metavar="N|all|none",
    show_default="as many as a minute allows, 4096 at least",
    help="How many samples' features to make where too few are kept.",
)
@WEIGHTS
@click.option(
    "--sample",
    "ids",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="ID [ID…]",
    help="Show everything about these samples instead; RUN comes first.",
)
@click.option(
    "--neighbours",
    type=click.IntRange(1, 100),
    metavar="K",
    help="With --sample or --serve: add the K nearest pictures and captions, and the K hardest negatives, by "
    "features of all samples, which are made once.",
)
@click.option(
    "--duplicates",
    is_flag=True,
    help="Look for duplicates instead: write RUN/report/duplicates.parquet and duplicates.html.",
)
@click.option(
    "--export",
    "rows_file",
    type=click.Path(path_type=Path),
    metavar="NAME.parquet|csv|fiftyone",
    help="Write one row per sample instead; .fiftyone: a folder with the pictures, which FiftyOne imports.",
)
@click.option(
    "--serve",
    "serves",
    is_flag=True,
    help="Serve a page of all samples to this machine's browser instead: search, page through, select.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="a free one", help="Port of --serve.")
@click.option("--overwrite", is_flag=True, help="Let --export replace an existing file.")
@RUN_DATA
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Directory of the page, made if it is missing. Default: RUN/report.",
)
@ALLOW
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object and write no page.")
@click.pass_context
def command(context: click.Context, /, more_ids: tuple[int, ...], **options: Any) -> None:
    """Summarise the temperatures of RUN and write RUN/report/report.html, with --at report-step-N.html; with --json,
    only print.

    Works while the run trains: reads the latest snapshot and changes nothing else. Needs no GPU. --data may name
    another dataset, for whose samples temperatures are solved from the features of the run's encoders.
    """
    from .inspect import MODES, InspectOptions, solve_other_dataset
    from .inspection.opening import OtherDatasetError

    asked = InspectOptions(**options | {"suspects": options["suspects"] or 0})
    if more_ids and not asked.ids:
        raise click.UsageError(f"unexpected argument {more_ids[0]}; sample ids come after --sample")
    if asked.neighbours and not (asked.ids or asked.serves):
        raise click.UsageError("--neighbours needs samples: --sample ID --neighbours K, or --serve --neighbours K")
    _refuse_others(context, asked.mode, asked.used)
    asked = replace(asked, ids=(*asked.ids, *more_ids), by=tuple(dict.fromkeys(asked.by)))
    try:
        MODES[asked.mode][0](asked)
    except OtherDatasetError as error:
        if asked.mode not in ("a report", "--export"):
            raise
        _refuse_others(context, "the --data of another dataset", _FOR_OTHER)
        solve_other_dataset(asked, error.dataset)


def _refuse_others(context: click.Context, mode: str, used: set[str]) -> None:
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if extra := [option for option in context.command.params if option.name in given - used]:
        names, beside = ", ".join(option.opts[0] for option in extra), mode
        if "as_json" in given & used and extra[0].name == "to":
            beside = "--json"
        elif {option.name for option in extra} <= {"weights", "allow_code"}:
            beside = f"{mode} that needs no encoders"
        raise click.UsageError(f"{names} has no effect with {beside}; leave out one of them")
