"""The pages' templates. Whatever they print is cleaned, cut and escaped, unless this module or a template made it."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from ..inspection import summary
from ..inspection.temperatures.through_time import HISTORY_QUANTILES
from ..printing import plain_text
from . import sheets
from .figures.svg import NARROW, WIDE, svg_of

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_TEXT_CHARACTERS = 2000
"""Limit for texts shown in full."""
LAYOUTS = (WIDE, NARROW)


def drawn(draw: Callable[..., None], *shown: object) -> Markup:
    """Draw a figure once in each layout; report.css shows the one that fits the screen. draw: as in figures/."""
    return Markup("").join(Markup(svg_of(partial(draw, *shown), size)) for size in LAYOUTS)


def part(template: str, macro: str, *arguments: object) -> Markup:
    """Return the HTML that a template's macro makes of its arguments."""
    made: Markup = getattr(_environment().get_template(template).module, macro)(*arguments)
    return made.strip()


def document(title: str, name: str, lede: str, facts: str, notes: Sequence[str], parts: Mapping[str, Markup]) -> str:
    """Return a whole page with inline style and script, and a policy that blocks everything else.

    The run's `name` follows the title; facts may be empty. parts map headings to HTML.
    """
    css, script = (Path(__file__).with_name(file).read_text("utf-8") for file in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shown = {"title": title, "name": name, "lede": lede, "facts": facts, "notes": notes, "parts": parts}
    inline = {"css": Markup(css), "script": Markup(script), "digest": digest}
    return _environment().get_template("page.html").render(shown | inline)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from .figures import by_group, embedding_map, histograms, lines  # late, because they import matplotlib

    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else _cut(value),
    )
    made.filters |= {
        "cut": _cut,
        "code": lambda words: Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(_cut(words)))),
        "thousands": "{:,}".format,
        "tau": summary.tau,
        "share": summary.share,
        "sort_key": lambda x: "" if x is None or math.isnan(x) else f"{x:.9g}".replace("inf", "Infinity"),
        "state_word": sheets.state_word,
    }
    figures = {"by_group": by_group, "embedding_map": embedding_map, "histograms": histograms, "lines": lines}
    words = {"summary": summary, "sheets": sheets}
    made.globals |= figures | words | {"drawn": drawn, "HISTORY_QUANTILES": HISTORY_QUANTILES}
    return made


def _cut(words: object, most: int = 1000) -> Markup:
    """Return words, or HTML without elements, as HTML on one line, cut after `most` characters."""
    return escape(plain_text(words.unescape() if isinstance(words, Markup) else str(words), most))
