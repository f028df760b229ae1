"""RUN/report: one HTML page that needs nothing else, and two figures as PNG.

The page is built from strings; everything that comes from data, settings or the file system passes `_text`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path

import numpy as np

from ..pipeline.dataset import Dataset
from ..pipeline.errors import DatasetError
from ..trainer.files import write_atomically
from . import summary
from .contact_sheet import ENDS, Sheet, choose_sheet, data_uri, thumbnail
from .figures import DARK, LIGHT, Style, draw_tau_by_class, draw_tau_histograms, narrow
from .inspection import Inspection, RunState
from .plain_text import plain_text
from .temperatures import Classes, Correlation, Side, Temperatures

PAGE = "report.html"
BY_CLASS_FIGURE = "tau_by_class.png"
HISTOGRAM_FIGURE = "tau_histogram.png"
MOST_CLASS_ROWS = 500
"""A page with more rows is slow to open; of more classes, the largest and the smallest are shown."""
CLEAR_CORRELATION = 0.5
CSP = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

Draw = Callable[[Style, str], bytes]
"""A figure's PNG in a style, with a note below it."""


def write_report(inspection: Inspection, temperatures: Temperatures) -> Path:
    """Write the page and the figures, each whole or not at all, and return the page's path."""
    folder = inspection.run.report
    folder.mkdir(exist_ok=True)
    drawings: dict[str, Draw] = {}
    if (state := inspection.state) and temperatures.sides:
        drawings[HISTOGRAM_FIGURE] = partial(draw_tau_histograms, temperatures.sides, state.visited, state.tau_init)
        if temperatures.classes:
            drawings[BY_CLASS_FIGURE] = partial(draw_tau_by_class, temperatures.sides, temperatures.classes)
    for name in (BY_CLASS_FIGURE, HISTOGRAM_FIGURE):
        if state and name in drawings:
            write_atomically(folder / name, drawings[name](LIGHT, _what(state)))
        else:
            # A figure that an earlier look left behind would pass for this one's.
            (folder / name).unlink(missing_ok=True)
    write_atomically(folder / PAGE, build_page(inspection, temperatures, drawings).encode())
    return folder / PAGE


def build_page(inspection: Inspection, temperatures: Temperatures, drawings: dict[str, Draw]) -> str:
    """The whole page; `drawings` are the figures there are, by file name."""
    sections: dict[str, str] = {}
    if (state := inspection.state) and temperatures.sides:
        if BY_CLASS_FIGURE in drawings and temperatures.classes:
            caption = _by_class_caption(state, temperatures.sides, temperatures.classes)
            sections["By class size"] = _figure(drawings[BY_CLASS_FIGURE], "Mean tau by class size", caption)
        caption = f"How many samples have which tau. {_what(state)}."
        sections["Distribution"] = _figure(drawings[HISTOGRAM_FIGURE], "Histograms of tau", caption)
    sections["Summary"] = _summary(inspection, temperatures)
    if temperatures.classes:
        sections["Classes"] = _class_table(temperatures.sides, temperatures.classes)
    if state and inspection.dataset and temperatures.sides:
        sections["Lowest and highest"] = _sheets(state, inspection.dataset, temperatures.sides)
    name = inspection.run.path.resolve().name
    return _document(name, _lede(temperatures), temperatures.notes, sections)


def _document(name: str, lede: str, notes: list[str], sections: dict[str, str]) -> str:
    css = Path(__file__).with_name("report.css").read_text("utf-8")
    anchors = {title: title.lower().replace(" ", "-") for title in sections}
    links = "".join(f'<li><a href="#{anchor}">{title}</a></li>' for title, anchor in anchors.items())
    body = "".join(
        f'<section aria-labelledby="{anchors[title]}"><h2 id="{anchors[title]}">{title}</h2>{content}</section>\n'
        for title, content in sections.items()
    )
    said = "".join(f"<li>{_text(note, most=1000)}</li>" for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{CSP}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(name)}: temperatures</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>What the temperatures of <bdi>{_text(name)}</bdi> say</h1>
<p class="lede">{lede}</p>
{f'<ul class="notes">{said}</ul>' if notes else ""}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{body}</main>
</body>
</html>
"""


def _lede(temperatures: Temperatures) -> str:
    """What is seen, in one sentence."""
    sides, classes = temperatures.sides, temperatures.classes
    if not sides:
        return "There are no temperatures to show."
    found = {side.label: classes.correlation[side.name] for side in sides} if classes else {}
    known = {label: correlation for label, correlation in found.items() if correlation}
    if not classes or not known:
        means = _per_side({side.label: summary.tau(side.summary.mean) for side in sides})
        return f"The mean temperature tau is {means}."
    figures = _per_side({label: summary.correlation(c.spearman) for label, c in known.items()})
    return (
        f"{_relation(list(known.values()))}: over {len(classes.names):,} classes, Spearman’s correlation of class "
        f"size and mean tau is {figures}."
    )


def _relation(correlations: list[Correlation]) -> str:
    if all(c.spearman >= CLEAR_CORRELATION for c in correlations):
        return "Frequent classes have high temperatures, rare ones low"
    if all(c.spearman <= -CLEAR_CORRELATION for c in correlations):
        return "Frequent classes have low temperatures, rare ones high"
    return "Temperatures do not clearly follow class size"


def _what(state: RunState) -> str:
    """What a figure shows, in plain characters."""
    return f"{int(state.visited.sum()):,} visited of {state.samples:,} samples, {state.snapshot.tag}"


def _by_class_caption(state: RunState, sides: list[Side], classes: Classes) -> str:
    known = {side.label: c for side in sides if (c := classes.correlation[side.name])}
    caption = f"Each dot is a class: its mean tau against its number of samples. {_what(state)}."
    if known:
        caption += (
            f" Spearman’s correlation: {_per_side({k: summary.correlation(c.spearman) for k, c in known.items()})}; "
            "with the samples’ class labels permuted, mean of 20 permutations: "
            f"{_per_side({k: summary.correlation(c.permuted) for k, c in known.items()})}."
        )
    return caption


def _per_side(figures: dict[str, str]) -> str:
    """`+0.93 (image) and +0.92 (text)`; of one side, the figure alone."""
    if len(figures) == 1:
        return next(iter(figures.values()))
    return " and ".join(f"{figure} ({label})" for label, figure in figures.items())


def _figure(draw: Draw, alt: str, caption: str) -> str:
    """A figure in four forms, of which the browser shows the one that fits its width and colours."""
    phone, dark = "(max-width: 640px)", "(prefers-color-scheme: dark)"
    forms = ((f"{phone} and {dark}", narrow(DARK)), (phone, narrow(LIGHT)), (dark, DARK))
    sources = "".join(
        f'<source media="{media}" srcset="{data_uri(draw(style, ""), "image/png")}">' for media, style in forms
    )
    image = f'<img src="{data_uri(draw(LIGHT, ""), "image/png")}" alt="{_text(alt)}: {_text(caption, most=1000)}">'
    return f"<figure><picture>{sources}{image}</picture><figcaption>{_text(caption, most=1000)}</figcaption></figure>"


def _summary(inspection: Inspection, temperatures: Temperatures) -> str:
    facts = "".join(
        f"<div><dt>{word}</dt><dd><bdi>{_text(value)}</bdi></dd></div>" for word, value in summary.facts(inspection)
    )
    content = f"<dl>{facts}</dl>"
    if (state := inspection.state) and temperatures.sides:
        rows = summary.table(temperatures, state)
        head = ["tau of the visited samples", *(side.label for side in temperatures.sides)]
        caption = "Temperatures of each side; tau has no unit."
        content += _table(caption, head, [[row.label, *row.cells] for row in rows])
    return content


def _class_table(sides: list[Side], classes: Classes) -> str:
    places = list(range(len(classes.names)))
    caption = f"Mean tau of {len(places):,} classes, the largest first."
    if len(places) > MOST_CLASS_ROWS:
        places = places[: MOST_CLASS_ROWS // 2] + places[-MOST_CLASS_ROWS // 2 :]
        caption += f" Shown are the {MOST_CLASS_ROWS // 2} largest and the {MOST_CLASS_ROWS // 2} smallest."
    rows = [
        [classes.names[place], f"{classes.sizes[place]:,}", *(_mean(classes, side, place) for side in sides)]
        for place in places
    ]
    head = ["class", "samples", *(f"{side.label} tau" for side in sides)]
    return f'<div class="scroll" role="region" aria-label="Classes" tabindex="0">{_table(caption, head, rows)}</div>'


def _mean(classes: Classes, side: Side, place: int) -> str:
    mean = classes.mean_tau[side.name][place]
    return "not visited" if np.isnan(mean) else summary.tau(mean)


def _table(caption: str, head: list[str], rows: list[list[str]]) -> str:
    """A table whose first column names the rows."""
    heads = "".join(f'<th scope="col">{_text(word)}</th>' for word in head)
    lines = "".join(
        f'<tr><th scope="row"><bdi>{_text(first)}</bdi></th>{"".join(f"<td>{_text(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    return f"<table><caption>{_text(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"


def _sheets(state: RunState, dataset: Dataset, sides: list[Side]) -> str:
    sheets = [choose_sheet(side, state.visited, end) for side in sides for end in ENDS]
    shown = sorted({sample_id for sheet in sheets for sample_id in sheet.sample_ids})
    try:
        pictures = {sample_id: thumbnail(dataset.jpeg(sample_id)) for sample_id in shown}
    except (DatasetError, OSError) as error:
        return f"<p>The pictures cannot be shown: {_text(str(error), most=1000)}</p>"
    rows = {row["sample_id"]: row for row in dataset.rows(shown)}
    return "".join(_sheet(sheet, rows, pictures) for sheet in sheets)


def _sheet(sheet: Sheet, rows: dict[int, dict[str, str | None]], pictures: dict[int, str]) -> str:
    cards = "".join(
        _card(sample_id, float(sheet.side.tau[sample_id]), rows[sample_id], pictures[sample_id])
        for sample_id in sheet.sample_ids
    )
    title = f"{sheet.side.label}: the {len(sheet.sample_ids)} samples with the {sheet.end} tau"
    tied = ""
    if sheet.not_shown:
        tied = f"<p>{sheet.not_shown:,} more have the same tau as the last one here, and higher ids.</p>"
    return f'<h3>{title}</h3>{tied}<ul class="sheet">{cards}</ul>'


def _card(sample_id: int, tau: float, row: dict[str, str | None], picture: str) -> str:
    group = f'<bdi class="group">{_text(row["group"])}</bdi>' if row["group"] is not None else ""
    caption = f'<bdi class="caption">{_text(row["caption"])}</bdi>' if row["caption"] is not None else ""
    return (
        f'<li><img src="{picture}" alt="picture of sample {sample_id}" loading="lazy">'
        f'<b>tau {summary.tau(tau)}</b>{group}{caption}<span class="id">id {sample_id}</span></li>'
    )


def _text(text: str, most: int = 200) -> str:
    """Text of any origin as HTML text or attribute value: made harmless, cut, escaped."""
    return escape(plain_text(text, most))
