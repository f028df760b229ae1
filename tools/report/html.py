"""The page's building blocks, as strings; all that comes from data, settings or the file system passes `text`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from ..plain_text import plain_text
from .figures.style import DARK, LIGHT, PIXELS_PER_INCH, Draw, narrow

MAX_CHARACTERS = 2000
"""Of a text that is shown whole."""
CSS_PIXELS_PER_INCH = 120
"""CSS pixels for an inch of a figure: its text then has the size of the page's small print."""
WIDTH_IN_PNG = slice(16, 20)
PHONE, DARK_SCREEN = "(max-width: 640px)", "(prefers-color-scheme: dark)"


class Cell(NamedTuple):
    """A number in a table: as it is shown, and as it is sorted by; None stands last whichever way."""

    shown: str
    value: float | None


def text(words: str, most: int = 200) -> str:
    """Text of any origin as HTML text or attribute value: made harmless, cut, escaped."""
    return escape(plain_text(words, most))


def figure(draw: Draw, alt: str, caption: str) -> str:
    """A figure in four forms, of which the browser shows the one that fits its width and colours.

    alt: what it shows, in a few words; the caption says the rest.
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
    """A table whose first column names the rows; the page's script lets its rows be sorted by any column."""
    heads = "".join(f'<th scope="col">{text(word)}</th>' for word in head)
    lines = "".join(
        f'<tr><th scope="row">{_cell(first, bidi=True)}</th>{"".join(map(_data_cell, cells))}</tr>'
        for first, *cells in rows
    )
    made = f"<table><caption>{text(caption, most=1000)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    # A region of its own scrolls sideways on a phone, and can be reached by keyboard.
    return f'<div class="scroll" role="region" aria-label="{text(caption)}" tabindex="0">{made}</table></div>'


def _data_cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{_cell(cell)}</td>"
    # As JavaScript reads numbers: -inf is -Infinity there.
    value = "" if cell.value is None else f"{cell.value:.9g}".replace("inf", "Infinity")
    return f'<td data-value="{value}">{_cell(cell.shown)}</td>'


def _cell(cell: str | Cell, *, bidi: bool = False) -> str:
    shown = text(cell.shown if isinstance(cell, Cell) else cell)
    return f"<bdi>{shown}</bdi>" if bidi else shown


def facts_list(facts: Sequence[tuple[str, str]], longest: int = MAX_CHARACTERS) -> str:
    """Pairs of a word and a text of up to `longest` characters."""
    rows = "".join(
        f"<div><dt>{text(word)}</dt><dd><bdi>{text(value, most=longest)}</bdi></dd></div>" for word, value in facts
    )
    return f"<dl>{rows}</dl>"


def count(number: int) -> Cell:
    """A whole number in a table."""
    return Cell(f"{number:,}", int(number))


def per_side(figures: dict[str, str]) -> str:
    """`+0.93 (image) and +0.92 (text)`; of one side, the figure alone."""
    if len(figures) == 1:
        return next(iter(figures.values()))
    return " and ".join(f"{figure} ({side})" for side, figure in figures.items())


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
