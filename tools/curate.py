"""`thermopile curate`: choose what to train on next by a run's state."""

from __future__ import annotations

import json
import math
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from ..storage.place import Place, Places
from .arguments import RUN, RUN_DATA
from .printing import plain_text, print_facts, print_table

if TYPE_CHECKING:
    from .curation import Curation

ALL_MISFITS = 1 << 62
RULES = {
    "listed": ("tags", "drop"),
    "misfit": ("misfits", "precision"),
    "duplicate": ("per_cluster",),
    "class_full": ("per_class",),
}
"""Reason -> the options that drop samples for it."""


def _number(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number")
    return value


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile inspect runs/cc3m --duplicates\n"
    "  thermopile curate runs/cc3m --keep keep.parquet --drop-misfits 5000 --thin 1\n"
    "  thermopile train --data data/cc3m --select keep.parquet --out runs/cc3m-curated\n\n"
    "\b\n"
    "  thermopile curate runs/cc3m --keep weighted.parquet --cap 1000 --tau-power -0.5\n"
    "  thermopile train --data data/cc3m --select weighted.parquet --weights weighted.parquet --out runs/cc3m-weighted",
)
@RUN
@click.option(
    "--keep",
    required=True,
    type=click.Path(path_type=Path),
    metavar="NAME.parquet",
    help="Write the kept samples to this file, for train --select; the dropped ones and the reasons to "
    "NAME.dropped.parquet beside it.",
)
@click.option(
    "--tags",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="samples.json",
    help="Drop the samples tagged `drop` in this file that FiftyOne exported; keep those tagged `keep`, whatever else.",
)
@click.option(
    "--drop",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.parquet",
    help="Drop the samples with a `sample_id` in this file, such as one from the served page.",
)
@click.option(
    "--drop-misfits",
    "misfits",
    type=click.IntRange(1),
    is_flag=False,
    flag_value=ALL_MISFITS,
    default=None,
    metavar="[N]",
    help="Drop the N samples with the highest log s over the whole run; without N, as many as --precision 0.5 does. "
    "RUN comes first.",
)
@click.option(
    "--precision",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="P",
    callback=_number,
    help="Drop as many misfits as are expected to have this share of wrong captions. Needs a run with data.planted, or "
    "one of `thermopile score`.",
)
@click.option(
    "--thin",
    "per_cluster",
    type=click.IntRange(1),
    metavar="K",
    help="Keep at most K samples of each cluster that inspect --duplicates has found.",
)
@click.option(
    "--cap",
    "per_class",
    type=click.IntRange(1),
    metavar="N",
    help="Keep at most N samples of each class, drawn at random.",
)
@click.option(
    "--by",
    "class_column",
    metavar="COLUMN",
    show_default="group, the class",
    help="With --cap: the column of the samples table that holds the classes, or `folder`.",
)
@click.option(
    "--tau-power",
    type=click.FloatRange(-4, 4),
    default=0.0,
    metavar="P",
    callback=_number,
    help="Weight each sample by its tau to this power: below 0 a low tau counts more, above 0 a high one. "
    "Pass the file to train --weights too.",
)
@click.option("--at", default="latest", show_default=True, metavar="TAG|ID", help="The snapshot to judge by.")
@RUN_DATA
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
@click.option("--json", "as_json", is_flag=True, help="Print what was kept and dropped as one JSON object.")
def curate(run: Place, keep: Path, at: str, data: Places | None, overwrite: bool, as_json: bool, **asked: Any) -> None:
    """Choose samples of RUN's dataset by RUN's state, and write their ids and weights.

    The rules apply in the order of the options; a sample has one reason at most to be dropped. Works while the run
    trains and changes nothing in it.
    """
    if not any(value for option, value in asked.items() if option != "class_column"):
        raise click.UsageError("no rule; give --tags, --drop, --drop-misfits, --precision, --thin, --cap, --tau-power")
    if asked["class_column"] and not asked["per_class"]:
        raise click.UsageError("--by has no effect without --cap")
    from .curation import HALF, CurationRules, curate_run

    asked["precision"] = asked["precision"] or (HALF if asked["misfits"] == ALL_MISFITS else None)
    rules = CurationRules(**asked | {"class_column": asked["class_column"] or "group"})
    found, dropped = curate_run(run, keep, rules, at=at, data=data, overwrite=overwrite)
    counts = found.counts
    if as_json:
        written = {"keep": str(keep), "dropped": str(dropped), "snapshot": found.inspection.state.snapshot.tag}
        click.echo(json.dumps(written | {"samples": counts, "notes": found.notes}))
        return
    print_facts([], found.notes)
    shown = [name for name in counts if counts[name] or any(asked[rule] for rule in RULES.get(name, ()))]
    print_table(["", ">samples"], [[name.replace("_", " "), f"{counts[name]:,}"] for name in shown])
    click.echo(keep)
    click.echo(dropped)
    click.echo(plain_text(f"next: {_next_steps(str(run), str(keep), str(dropped), found)}", most=1000))


def _next_steps(run: str, keep: str, dropped: str, found: Curation) -> str:
    """Return the commands that take these files."""
    data = found.inspection.config.data
    if data.parts:
        return "make a file for each part by `part` and `id_in_part`; `train --select` takes ids of one dataset alone"
    weighed = f" --weights {quote(keep)}" * (found.weights is not None)
    ways = [f"`thermopile train --select {quote(keep)}{weighed} …`"]
    if len(found.dropped) and not data.without:  # a fork's file must name also what its origin leaves out
        ways.append(f"`thermopile fork {quote(run)} --without {quote(dropped)} …`")
    return ", or ".join(ways)
