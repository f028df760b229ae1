"""RUN/report: one HTML page that needs nothing else, and the leading figure as a picture."""

from __future__ import annotations

from pathlib import Path

from ...trainer.files import write_atomically
from ..inspection import summary
from ..inspection.findings import Findings, shown_ids
from ..inspection.groups import CLASS_COLUMN
from . import grouping, movement, sections
from .document import document
from .figures.style import LIGHT
from .html import facts_list
from .pictures import data_uris, read_pictures
from .sheets import Cards

PAGE = "report.html"
LEADING_FIGURE = "tau_by_class.png"
MOST_BYTES = 7_800_000
"""Of the page, which opens at once and can be sent to somebody. Pictures get what the rest leaves."""
LONGEST_TEXTS = (2000, 500, 100)
"""Characters of the texts on a card, from what is whole to what can just be told apart."""
IMAGE_TAG_BYTES = 100


def write_report(findings: Findings, folder: Path) -> Path:
    """Write the page and the leading figure into `folder`, each whole or not at all, and return the page's path."""
    survey = findings.survey
    folder.mkdir(exist_ok=True)
    write_atomically(folder / PAGE, build_page(findings).encode())
    if survey and survey.groups and survey.groups[0].column == CLASS_COLUMN:
        figure = grouping.draw_by_group(survey, survey.groups[0])
        write_atomically(folder / LEADING_FIGURE, figure(LIGHT, sections.what(findings)))
    else:
        # A figure that an earlier look left behind would pass for this one's.
        (folder / LEADING_FIGURE).unlink(missing_ok=True)
    return folder / PAGE


def build_page(findings: Findings) -> str:
    """The whole page. What cannot be shown of its pictures is added to the findings' notes."""
    figures = _figures(findings)
    sheets = _sheets(findings, MOST_BYTES - sum(len(content.encode()) for content in figures.values()))
    parts = {title: content for title, content in figures.items() if title.startswith("By ")}
    parts |= {"Coldest and hottest": sheets["ends"]} if sheets["ends"] else {}
    parts |= figures
    if findings.drift:
        parts["Drift"] += sheets["movers"]
    facts = f"{_dataset_name(findings)}: {sections.what(findings)}" if findings.survey else ""
    name, notes = findings.inspection.run.path.resolve().name, [*findings.warnings, *findings.notes]
    return document("What the temperatures of {} say", name, grouping.lede(findings.survey), facts, notes, parts)


def _figures(findings: Findings) -> dict[str, str]:
    """All sections but the contact sheets, by title, in their order."""
    survey, parts = findings.survey, {}
    if survey and survey.sides:
        for groups in survey.groups:
            parts[f"By {groups.word}"] = grouping.by_group(findings, survey, groups)
        parts["Distribution"] = sections.distribution(findings, survey)
        for groups in survey.groups:
            parts[f"Table by {groups.word}"] = grouping.group_tables(survey, groups)
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


def _sheets(findings: Findings, room: int) -> dict[str, str]:
    """The contact sheets, in `room` bytes: texts are cut where they take more than half of it, pictures reduced."""
    survey, details = findings.survey, findings.details
    if survey is None or not details:
        return {"ends": "", "movers": ""}

    def built(cards: Cards) -> dict[str, str]:
        return {
            "ends": sections.sheets(survey, cards),
            "movers": movement.movers(findings.drift, cards) if findings.drift else "",
        }

    for longest in LONGEST_TEXTS:
        without = built(Cards(details, {}, longest))
        if (size := sum(len(content.encode()) for content in without.values())) <= room // 2:
            break
    dataset, shown = findings.inspection.dataset, shown_ids(survey, findings.drift)
    pictures = read_pictures(dataset, shown, findings.notes) if dataset else {}
    uris = data_uris(pictures, shown, room - size - IMAGE_TAG_BYTES * len(shown))
    if pictures and not uris:
        findings.notes.append("The page has no room for pictures; group by fewer columns.")
    return built(Cards(details, uris, longest))


def _dataset_name(findings: Findings) -> str:
    dataset = findings.inspection.dataset
    return (dataset.path if dataset else Path(findings.inspection.config.data.path)).resolve().name
