"""RUN/report: one HTML page that needs nothing else, and the leading figure as a picture."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from ...pipeline.errors import DatasetError
from ...trainer.files import write_atomically
from ..inspection import summary
from ..inspection.advice import warnings
from ..inspection.details import read_details
from ..inspection.run import Inspection
from ..inspection.survey import Survey
from . import sections
from .figures.style import LIGHT
from .html import text
from .pictures import data_uris
from .sheets import Cards, facts_html

PAGE = "report.html"
LEADING_FIGURE = "tau_by_class.png"
MOST_BYTES = 7_800_000
"""Of the page, which opens at once and can be sent to somebody. Pictures get what the rest leaves."""
CARD_BYTES = 3000
"""Of a card without its picture, and with more texts than most."""
_SHEETS = "Coldest and hottest"


def write_report(inspection: Inspection, survey: Survey | None) -> Path:
    """Write the page and the leading figure, each whole or not at all, and return the page's path."""
    folder = inspection.run.report
    folder.mkdir(exist_ok=True)
    write_atomically(folder / PAGE, build_page(inspection, survey).encode())
    if survey and survey.groups:
        figure = sections.draw_by_group(survey, survey.groups[0])
        write_atomically(folder / LEADING_FIGURE, figure(LIGHT, sections.what(inspection, survey)))
    else:
        # A figure that an earlier look left behind would pass for this one's.
        (folder / LEADING_FIGURE).unlink(missing_ok=True)
    return folder / PAGE


def build_page(inspection: Inspection, survey: Survey | None) -> str:
    """The whole page."""
    parts: dict[str, str] = {}
    if survey and survey.sides:
        for groups in survey.groups:
            parts[f"By {groups.word}"] = sections.by_group(inspection, survey, groups)
        parts[_SHEETS] = ""
        parts["Distribution"] = sections.distribution(inspection, survey)
        for groups in survey.groups:
            parts[f"Table by {groups.word}"] = sections.group_tables(survey, groups)
    if survey and survey.visited:
        parts["Rest of the state"] = sections.rest_of_state(inspection, survey)
    parts["Run"] = facts_html(summary.facts(inspection, survey))
    if survey and _SHEETS in parts:
        room = MOST_BYTES - sum(map(len, parts.values()))
        parts[_SHEETS] = sections.sheets(survey, _cards(inspection, survey, room))
    return _document(inspection, survey, parts)


def _cards(inspection: Inspection, survey: Survey, room: int) -> Cards:
    """Cards of all samples that the page shows; without pictures, and with a note, where these cannot be read."""
    shown = [sample_id for sheet in survey.sheets for sample_id in sheet.sample_ids]
    details = read_details(inspection, shown)
    try:
        pictures = (
            data_uris(inspection.dataset.jpeg, shown, room - CARD_BYTES * len(shown)) if inspection.dataset else {}
        )
    except (DatasetError, OSError) as error:
        survey.notes.append(f"The pictures cannot be shown: {error}")
        pictures = {}
    return Cards(details, pictures)


def _document(inspection: Inspection, survey: Survey | None, parts: dict[str, str]) -> str:
    css, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    anchors = {title: title.lower().replace(" ", "-") for title in parts}
    links = "".join(f'<li><a href="#{text(anchor)}">{text(title)}</a></li>' for title, anchor in anchors.items())
    body = "".join(
        f'<section aria-labelledby="{text(anchors[title])}"><h2 id="{text(anchors[title])}">{text(title)}</h2>'
        f"{content}</section>\n"
        for title, content in parts.items()
    )
    name = text(inspection.run.path.resolve().name)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{name}: temperatures</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>What the temperatures of <bdi>{name}</bdi> say</h1>
<p class="lede">{text(sections.lede(survey), most=1000)}</p>
{_facts(inspection, survey)}{_notes(inspection, survey)}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{body}</main>
<script>{script}</script>
</body>
</html>
"""


def _facts(inspection: Inspection, survey: Survey | None) -> str:
    if survey is None:
        return ""
    return f'<p class="facts"><bdi>{text(sections.what(inspection, survey), most=1000)}</bdi></p>'


def _notes(inspection: Inspection, survey: Survey | None) -> str:
    said = [*warnings(inspection, survey), *survey.notes] if survey else inspection.notes
    items = "".join(f"<li>{text(note, most=1000)}</li>" for note in said)
    return f'<ul class="notes">{items}</ul>' if items else ""
