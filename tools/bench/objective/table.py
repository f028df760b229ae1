"""The figures as tables, batch by contender."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..figure import plain_number
from .contenders import AUTOGRAD, FASTCLIP, OURS, PRODUCTS
from .measuring import Peaks, Times, asked_figures

_HEADINGS = {OURS: "ours", PRODUCTS: "3 bare products", AUTOGRAD: "plain autograd", FASTCLIP: "FastCLIP's path"}


def print_tables(times: Sequence[Times], peaks: Sequence[Peaks], *, judged: bool) -> None:
    """Print both parts, and a line for each figure that something is asked of."""
    if times:
        threads = max(row.timed.threads if row.timed else 0 for row in times)
        click.echo(f"\nforward + backward + new state, ms (times ours); {threads} threads of torch on the CPU")
        _print_rows(times, [_times_cells(row) for row in times])
    if peaks:
        click.echo("\npeak memory above features and state, MiB")
        _print_rows(peaks, [{name: plain_number(size / 2**20) for name, size in row.bytes.items()} for row in peaks])
    for figure in asked_figures(times, peaks):
        verdict = "" if not judged else ": held" if figure.held else ": missed"
        click.echo(f"{figure.label}: {plain_number(figure.ours)} {figure.unit}, asked {figure.asked}{verdict}")


def _times_cells(row: Times) -> dict[str, str]:
    if row.timed is None:
        return {}
    ratios = row.timed.times_ours
    cells = {name: f"{plain_number(ms)} ({plain_number(ratios[name])}×)" for name, ms in row.timed.ms.items()}
    return {**cells, OURS: plain_number(row.timed.ms[OURS]), "rounds": f"{row.timed.rounds}"}


def _print_rows(rows: Sequence[Times | Peaks], cells: Sequence[dict[str, str]]) -> None:
    case = rows[0].case
    keys = (*case.contenders, *(("rounds",) if isinstance(rows[0], Times) else ()))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("batch", *(_HEADINGS.get(key, key) for key in keys)):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, shown in zip(rows, cells, strict=True):
        table.add_row(f"{row.case.batch:,}", *(shown.get(key, "–") for key in keys))
    Console(highlight=False).print(table)
    for row in rows:
        for contender, reason in row.left_out.items():
            click.echo(f"{_HEADINGS[contender]} at batch {row.case.batch:,}: not measured: {reason}")
