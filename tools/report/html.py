"""HTML as strings: a self-contained document and its parts. Text from data, settings or files must pass `text`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from ..plain_text import plain_text
from .figures.style import DARK, LIGHT, PIXELS_PER_INCH, Draw, narrow, png_of

MAX_CHARACTERS = 2000
"""Limit for texts shown in full."""
CSS_PIXELS_PER_INCH = 120
"""CSS pixels per inch of a figure: its text then matches the page's small print."""
WIDTH_IN_PNG = slice(16, 20)
PHONE, DARK_SCREEN = "(max-width: 640px)", "(prefers-color-scheme: dark)"
FORMS = {f"{PHONE} and {DARK_SCREEN}": narrow(DARK), PHONE: narrow(LIGHT), DARK_SCREEN: DARK}
"""Where a browser shows which form of a figure; elsewhere the wide light one."""


class Cell(NamedTuple):
    """A number in a table: shown text and sort value; None sorts last in both directions."""

    shown: str
    value: float | None


Row = list[str | Cell]


def document(title: str, name: str, lede: str, facts: str, notes: Sequence[str], parts: Mapping[str, str]) -> str:
    """Return a whole page with inline style and script, and a policy that blocks everything else.

    The run's `name` replaces `{}` in the title; facts may be empty. name, lede, facts and notes are untrusted text;
    title is trusted; parts map headings to HTML.
    """
    css, script = (Path(__file__).with_name(file).read_text("utf-8") for file in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    anchors = {heading: text(heading.lower().replace(" ", "-")) for heading in parts}
    links = "".join(f'<li><a href="#{anchor}">{text(heading)}</a></li>' for heading, anchor in anchors.items())
    body = "".join(
        f'<section aria-labelledby="{anchors[heading]}"><h2 id="{anchors[heading]}">{text(heading)}</h2>\n'
        f"{content}</section>\n"
        for heading, content in parts.items()
    )
    said = "".join(f"<li>{text(note, most=1000)}</li>" for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title.format(text(name))}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{title.format(f"<bdi>{text(name)}</bdi>")}</h1>
<p class="lede">{text(lede, most=1000)}</p>
{f'<p class="facts"><bdi>{text(facts, most=1000)}</bdi></p>' if facts else ""}
{f'<ul class="notes">{said}</ul>' if notes else ""}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{body}</main>
<script>{script}</script>
</body>
</html>
"""


def text(words: str, most: int = 200) -> str:
    """Return untrusted text as HTML text or attribute value: cleaned, cut and escaped."""
    return escape(plain_text(words, most))


def figure(draw: Draw, alt: str, caption: str) -> str:
    """Return a figure in four variants; the browser shows the one that fits its width and colour scheme.

    alt: a short description; the caption has the details.
    """
    sources = "".join(
        f'<source media="{media}" srcset="{data_uri(png_of(draw, style), "image/png")}">'
        for media, style in FORMS.items()
    )
    wide = png_of(draw, LIGHT)
    width = int.from_bytes(wide[WIDTH_IN_PNG]) * CSS_PIXELS_PER_INCH // PIXELS_PER_INCH
    image = f'<img src="{data_uri(wide, "image/png")}" width="{width}" alt="{text(alt)}">'
    return f"<figure><picture>{sources}{image}</picture><figcaption>{text(caption, most=1000)}</figcaption></figure>"


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> str:
    """Return a table whose first column names the rows; the page's script makes it sortable."""
    heads = "".join(f'<th scope="col">{text(word)}</th>' for word in head)
    lines = "".join(
        f'<tr><th scope="row"><bdi>{text(str(first))}</bdi></th>{"".join(map(_data_cell, cells))}</tr>'
        for first, *cells in rows
    )
    made = f"<table><caption>{text(caption, most=1000)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    # A separate region scrolls sideways on a phone and can be reached by keyboard.
    return f'<div class="scroll" role="region" aria-label="{text(caption)}" tabindex="0">{made}</table></div>'


def _data_cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{text(cell)}</td>"
    # JavaScript reads -inf as -Infinity.
    value = "" if cell.value is None else f"{cell.value:.9g}".replace("inf", "Infinity")
    return f'<td data-value="{value}">{text(cell.shown)}</td>'


def facts_list(facts: Sequence[tuple[str, str]], longest: int = MAX_CHARACTERS) -> str:
    """Return a list of (label, text) pairs, texts up to `longest` characters."""
    rows = "".join(
        f"<div><dt>{text(word)}</dt><dd><bdi>{text(value, most=longest)}</bdi></dd></div>" for word, value in facts
    )
    return f"<dl>{rows}</dl>"


def count(number: int) -> Cell:
    """Return a table cell for a whole number."""
    return Cell(f"{number:,}", int(number))


def per_side(figures: Mapping[str, str]) -> str:
    """Return `+0.93 (image) and +0.92 (text)`, or just the figure if there is one side."""
    if len(figures) == 1:
        return next(iter(figures.values()))
    return " and ".join(f"{figure} ({side})" for side, figure in figures.items())


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
