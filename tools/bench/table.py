"""The figures of the parts as tables."""

from __future__ import annotations

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .figure import Figure, plain_number
from .measured import Measured


def print_part(part: str, measured: Measured, *, judged: bool) -> None:
    """Print `part`, what it did, and a row for each figure."""
    click.echo(f"\n{part}: {measured.title}")
    click.echo(f"alternative: {measured.versus}; took {measured.seconds:,.0f} s, "
               f"peak memory {measured.peak_bytes / 1e9:.2f} GB")  # fmt: skip
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("figure", min_width=16)
    for heading in ("ours", "alternative", "ratio", "asked"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for figure in measured.figures:
        shown.add_row(figure.label, *_cells(figure, judged=judged))
    Console(highlight=False).print(shown)
    for note in measured.notes:
        click.echo(note)


def _cells(figure: Figure, *, judged: bool) -> tuple[str, str, str, str]:
    def with_unit(value: float | None) -> str:
        return "" if value is None else f"{plain_number(value)} {figure.unit}"

    verdict = "" if figure.held is None or not judged else ": held" if figure.held else ": missed"
    ratio = "" if figure.ratio is None else plain_number(figure.ratio)
    if figure.ratios:
        ratio += f"\n({plain_number(min(figure.ratios))}–{plain_number(max(figure.ratios))})"
    return with_unit(figure.ours), with_unit(figure.alternative), ratio, figure.asked + verdict
