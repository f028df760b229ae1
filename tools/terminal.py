"""Print facts and tables on stdout; control characters in texts are escaped."""

from __future__ import annotations

from collections.abc import Sequence

import click

from .plain_text import plain_text

MAX_CHARACTERS = 1000
"""Limit per fact, which may hold paths."""
WIDEST = 10_000


def print_facts(pairs: Sequence[tuple[str, str]]) -> None:
    """Print (label, text) pairs, one per line, with the texts aligned."""
    width = max((len(word) for word, _ in pairs), default=0) + 2
    for word, value in pairs:
        click.echo(f"{word:{width}}{plain_text(value, MAX_CHARACTERS)}")


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text; a title that begins with > right-aligns its column. No cell is cut or wrapped."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        shown.add_column(title.lstrip(">"), justify="right" if title.startswith(">") else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*(Text(plain_text(cell)) for cell in row))
    # rich would cut cells to its width. A terminal wraps long lines itself, and a file needs no limit.
    Console(highlight=False, width=WIDEST).print(shown, crop=False, soft_wrap=True)
