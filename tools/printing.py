"""Print untrusted text safely: captions, class names and file names may come from anyone."""

import unicodedata
from collections.abc import Sequence

import click

MAX_CHARACTERS = 200
MAX_ERROR_CHARACTERS = 10_000
"""Limit for error messages: room for a few paths of maximal length and the cure."""

_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of characters that are invisible, or reorder or hide others."""
_JOINERS = "\u200c\u200d"
"""Harmless, and needed by Persian words and many emoji."""


def plain_text(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return `text` on one line, cut after `most` characters, with control and bidi characters written as [U+202E].

    The result can be encoded as UTF-8 whatever `text` holds. It is not escaped for HTML.
    """
    # Only look at the part that can be shown, however long the text is; outer white space does not count.
    line = " ".join(text[: 4 * most].split())
    cut = len(line) > most or len(text) > 4 * most
    hidden = {c for c in line[:most] if unicodedata.category(c) in _INVISIBLE and c not in _JOINERS}
    return "".join(f"[U+{ord(c):04X}]" if c in hidden else c for c in line[:most]) + ("…" if cut else "")


def print_facts(pairs: Sequence[tuple[str, str]], notes: Sequence[str] = ()) -> None:
    """Print (label, text) pairs and notes, one per line, with the texts aligned."""
    pairs = [*pairs, *(("note", note) for note in notes)]
    width = max((len(word) for word, _ in pairs), default=0) + 2
    for word, value in pairs:
        click.echo(f"{word:{width}}{plain_text(value, 1000)}")  # it may hold paths


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
    Console(highlight=False, width=10_000).print(shown, crop=False, soft_wrap=True)
