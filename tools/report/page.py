"""RUN/report: one HTML page that needs nothing else, and the leading figure as a picture."""

from __future__ import annotations

from pathlib import Path

from ...pipeline.errors import DatasetError
from ...trainer.files import write_atomically
from ..inspection import summary
from ..inspection.details import read_details
from ..inspection.findings import Findings
from . import movement, sections
from .document import document
from .figures.style import LIGHT
from .html import facts_list
from .pictures import data_uris
from .sheets import Cards

PAGE = "report.html"
LEADING_FIGURE = "tau_by_class.png"
MOST_BYTES = 7_800_000
"""Of the page, which opens at once and can be sent to somebody. Pictures get what the rest leaves."""
CARD_BYTES = 3000
"""Of a card without its picture, and with more texts than most."""


def write_report(findings: Findings) -> Path:
    """Write the page and the leading figure, each whole or not at all, and return the page's path."""
    folder, survey = findings.inspection.run.report, findings.survey
    folder.mkdir(exist_ok=True)
    write_atomically(folder / PAGE, build_page(findings).encode())
    if survey and survey.groups:
        figure = sections.draw_by_group(survey, survey.groups[0])
        write_atomically(folder / LEADING_FIGURE, figure(LIGHT, sections.what(findings)))
    else:
        # A figure that an earlier look left behind would pass for this one's.
        (folder / LEADING_FIGURE).unlink(missing_ok=True)
    return folder / PAGE


def build_page(findings: Findings) -> str:
    """The whole page. What cannot be shown of its pictures is added to the findings' notes."""
    figures = _figures(findings)
    cards = _cards(findings, MOST_BYTES - sum(map(len, figures.values())))
    parts = {title: content for title, content in figures.items() if title.startswith("By ")}
    if findings.survey and findings.survey.sides:
        parts["Coldest and hottest"] = sections.sheets(findings.survey, cards)
    parts |= figures
    if findings.drift:
        parts["Drift"] += movement.movers(findings.drift, cards)
    inspection = findings.inspection
    facts = f"{_dataset_name(findings)}: {sections.what(findings)}" if findings.survey else ""
    name, notes = inspection.run.path.resolve().name, [*findings.warnings, *findings.notes]
    return document("What the temperatures of {} say", name, sections.lede(findings.survey), facts, notes, parts)


def _figures(findings: Findings) -> dict[str, str]:
    """All sections but the contact sheets, by title, in their order."""
    survey, parts = findings.survey, {}
    if survey and survey.sides:
        for groups in survey.groups:
            parts[f"By {groups.word}"] = sections.by_group(findings, survey, groups)
        parts["Distribution"] = sections.distribution(findings, survey)
        for groups in survey.groups:
            parts[f"Table by {groups.word}"] = sections.group_tables(survey, groups)
    if findings.through_time:
        parts["Through time"] = movement.through_time(findings, findings.through_time)
    if findings.drift:
        parts["Drift"] = movement.drift(findings, findings.drift)
    if findings.map:
        parts["Map"] = sections.embedding_map(findings, findings.map)
    if survey and survey.sides:
        parts["Moving averages"] = sections.rest_of_state(findings, survey)
    parts["Run"] = facts_list(summary.facts(findings.inspection, survey))
    if survey and survey.visited:
        parts["Run"] += sections.coverage(findings, survey)
    return parts


def _cards(findings: Findings, room: int) -> Cards:
    """Cards of all samples that the page shows; without pictures, and with a note, where these cannot be read."""
    shown, inspection = findings.shown, findings.inspection
    if not shown:
        return Cards({}, {})
    details, pictures = read_details(inspection, shown), {}
    try:
        if inspection.dataset:
            pictures = data_uris(inspection.dataset.jpeg, shown, room - CARD_BYTES * len(shown))
    except (DatasetError, OSError) as error:
        findings.notes.append(f"The pictures cannot be shown: {error}")
    return Cards(details, pictures)


def _dataset_name(findings: Findings) -> str:
    dataset = findings.inspection.dataset
    return (dataset.path if dataset else Path(findings.inspection.config.data.path)).resolve().name
