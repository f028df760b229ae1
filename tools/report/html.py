"""HTML building blocks as strings; everything from data, settings or the file system must pass through `text`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from ..plain_text import plain_text
from .figures.style import DARK, LIGHT, PIXELS_PER_INCH, Draw, narrow

MAX_CHARACTERS = 2000
"""Limit for texts shown in full."""
CSS_PIXELS_PER_INCH = 120
"""CSS pixels per inch of a figure: its text then matches the page's small print."""
WIDTH_IN_PNG = slice(16, 20)
PHONE, DARK_SCREEN = "(max-width: 640px)", "(prefers-color-scheme: dark)"


class Cell(NamedTuple):
    """A number in a table: shown text and sort value; None sorts last in both directions."""

    shown: str
    value: float | None


def text(words: str, most: int = 200) -> str:
    """Return untrusted text as HTML text or attribute value: cleaned, cut and escaped."""
    return escape(plain_text(words, most))


def figure(draw: Draw, alt: str, caption: str) -> str:
    """Return a figure in four variants; the browser shows the one that fits its width and colour scheme.

    alt: a short description; the caption has the details.
    """
    forms = ((f"{PHONE} and {DARK_SCREEN}", narrow(DARK)), (PHONE, narrow(LIGHT)), (DARK_SCREEN, DARK))
    sources = "".join(
        f'<source media="{media}" srcset="{data_uri(draw(style), "image/png")}">' for media, style in forms
    )
    wide = draw(LIGHT)
    width = int.from_bytes(wide[WIDTH_IN_PNG]) * CSS_PIXELS_PER_INCH // PIXELS_PER_INCH
    image = f'<img src="{data_uri(wide, "image/png")}" width="{width}" alt="{text(alt)}">'
    return f"<figure><picture>{sources}{image}</picture><figcaption>{text(caption, most=1000)}</figcaption></figure>"


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> str:
    """Return a table whose first column names the rows; the page's script makes it sortable."""
    heads = "".join(f'<th scope="col">{text(word)}</th>' for word in head)
    lines = "".join(
        f'<tr><th scope="row">{_cell(first, bidi=True)}</th>{"".join(map(_data_cell, cells))}</tr>'
        for first, *cells in rows
    )
    made = f"<table><caption>{text(caption, most=1000)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    # A separate region scrolls sideways on a phone and can be reached by keyboard.
    return f'<div class="scroll" role="region" aria-label="{text(caption)}" tabindex="0">{made}</table></div>'


def _data_cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{_cell(cell)}</td>"
    # JavaScript reads -inf as -Infinity.
    value = "" if cell.value is None else f"{cell.value:.9g}".replace("inf", "Infinity")
    return f'<td data-value="{value}">{_cell(cell.shown)}</td>'


def _cell(cell: str | Cell, *, bidi: bool = False) -> str:
    shown = text(cell.shown if isinstance(cell, Cell) else cell)
    return f"<bdi>{shown}</bdi>" if bidi else shown


def facts_list(facts: Sequence[tuple[str, str]], longest: int = MAX_CHARACTERS) -> str:
    """Return a list of (label, text) pairs, texts up to `longest` characters."""
    rows = "".join(
        f"<div><dt>{text(word)}</dt><dd><bdi>{text(value, most=longest)}</bdi></dd></div>" for word, value in facts
    )
    return f"<dl>{rows}</dl>"


def count(number: int) -> Cell:
    """Return a table cell for a whole number."""
    return Cell(f"{number:,}", int(number))


def per_side(figures: dict[str, str]) -> str:
    """Return `+0.93 (image) and +0.92 (text)`, or just the figure if there is one side."""
    if len(figures) == 1:
        return next(iter(figures.values()))
    return " and ".join(f"{figure} ({side})" for side, figure in figures.items())


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
