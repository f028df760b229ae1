"""RUN/report: the page on a run with its leading figure as a picture, and the page on single samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ...storage.files import write_atomically
from ..inspection import summary
from ..inspection.findings import Findings, shown_ids
from ..inspection.groups import CLASS_COLUMN
from ..inspection.run import Inspection
from ..inspection.samples import Sample
from ..inspection.survey import Survey
from . import grouping, sections
from .figures.by_group import draw_tau_by_group
from .figures.over_time import draw_history
from .figures.style import LIGHT, png_of
from .html import MAX_CHARACTERS, Cell, Row, data_uri, document, facts_list, figure, table
from .kinds import kinds
from .neighbourhood import Around, listed_ids
from .neighbourhood import sheets as neighbour_sheets
from .sheets import Cards, data_uris, facts, number, read_pictures, state_word

PAGE, SAMPLES_PAGE = "report.html", "samples.html"
LEADING_FIGURE = "tau_by_class.png"
OF_PREDICTED = "predicted_"
"""Begins the names of files on predicted temperatures, so that they leave the run's own report alone."""
MAX_BYTES = 7_800_000
"""Size limit of the page, so that it opens quickly and can be mailed. Pictures get the space that is left."""
LONGEST_TEXTS = (MAX_CHARACTERS, 500, 100)
"""Character limits to try for texts on a card, from complete to barely distinguishable."""
IMAGE_TAG_BYTES = 100


def write_report(findings: Findings, folder: Path) -> Path:
    """Write the page and the leading figure into `folder`, each atomically, and return the page's path."""
    survey, prefix = findings.survey, _prefix(findings.inspection)
    folder.mkdir(exist_ok=True)
    write_atomically(folder / (prefix + PAGE), build_page(findings).encode())
    if survey and survey.groups and survey.groups[0].column == CLASS_COLUMN:
        draw = partial(draw_tau_by_group, survey.sides, survey.groups[0])
        leading = png_of(draw, LIGHT, summary.what(findings.inspection, survey))
        write_atomically(folder / (prefix + LEADING_FIGURE), leading)
    else:
        # A figure left by an earlier report would be mistaken for this one's.
        (folder / (prefix + LEADING_FIGURE)).unlink(missing_ok=True)
    return folder / (prefix + PAGE)


def _prefix(inspection: Inspection) -> str:
    return OF_PREDICTED if inspection.prediction else ""


def build_page(findings: Findings) -> str:
    """Return the whole page. Pictures that cannot be shown are added to the findings' notes."""
    inspection, survey = findings.inspection, findings.survey
    leading = {f"By {groups.word}": grouping.by_group(inspection, survey, groups)
               for groups in survey.groups} if survey else {}  # fmt: skip
    following = _following(findings)
    used = sum(len(content.encode()) for content in (*leading.values(), *following.values()))
    ends, of_kinds, movers = _sheets(findings, MAX_BYTES - used)
    if ends:
        leading["Coldest and hottest"] = ends
    if of_kinds:
        leading["Kinds of samples"] = of_kinds
    if findings.drift:
        following["Drift"] += movers
    dataset = inspection.dataset.name if inspection.dataset else Path(inspection.config.data.path).name
    facts = f"{dataset}: {summary.what(inspection, survey)}" if survey else ""
    name, notes = inspection.run.path.resolve().name, [*findings.warnings, *findings.notes]
    title, lede = "Temperatures of {}", " ".join([*findings.said_first, grouping.lede(survey)])
    if inspection.prediction:
        title, lede = "Temperatures predicted by {}", f"Predicted, not trained. {lede}"
    return document(title, name, lede, facts, notes, leading | following)


def _following(findings: Findings) -> dict[str, str]:
    """Return the sections after the contact sheets, by title."""
    inspection, survey = findings.inspection, findings.survey
    parts: dict[str, str] = {}
    if survey and survey.sides:
        parts["Distribution"] = sections.distribution(inspection, survey)
        for groups in survey.groups:
            tables = (grouping.band_table(survey.sides, groups), grouping.group_table(survey.sides, groups))
            parts[f"Table by {groups.word}"] = "".join(tables)
    if findings.through_time:
        parts["Through time"] = sections.through_time(inspection, findings.through_time)
    if survey and survey.doubted:
        parts["Doubted pairs"] = sections.doubted(survey.doubted)
    if findings.drift:
        parts["Drift"] = sections.drift(inspection, findings.drift)
    if survey and findings.map:
        parts["Map"] = sections.embedding_map(inspection, survey, findings.map)
    if survey and survey.visited and (averages := sections.moving_averages(inspection, survey)):
        parts["Moving averages"] = averages
    parts["Run"] = facts_list(summary.facts(inspection, survey))
    if survey and survey.visited and not inspection.prediction:
        parts["Run"] += sections.coverage(inspection, survey)
    return parts


def _sheets(findings: Findings, room: int) -> tuple[str, str, str]:
    """Return contact sheets of the ends of tau, of the kinds and of the samples that moved most; empty without them.

    They fit `room` bytes: texts are cut to at most half of it, pictures are reduced.
    """
    survey, drift = findings.survey, findings.drift
    if survey is None or not findings.samples:
        return "", "", ""

    def built(pictures: Mapping[int, str], longest: int) -> tuple[str, str, str]:
        cards = Cards(findings.samples, pictures, longest)
        of_kinds = kinds(survey, findings.confirmation, cards)
        return sections.sheets(survey, cards), of_kinds, sections.movers(drift, cards) if drift else ""

    for longest in LONGEST_TEXTS:
        size = sum(len(sheets.encode()) for sheets in built({}, longest))
        if size <= room // 2:
            break
    dataset, shown = findings.inspection.dataset, shown_ids(survey, drift)
    pictures = read_pictures(dataset, shown, findings.notes) if dataset else {}
    uris = data_uris(pictures, shown, room - size - IMAGE_TAG_BYTES * len(shown))
    if pictures and not uris:
        findings.notes.append("There is no room for pictures on the page; group by fewer columns.")
    return built(uris, longest)


def write_samples(
    inspection: Inspection, survey: Survey | None, samples: Sequence[Sample], folder: Path,
    around: Around, listed: Mapping[int, Sample],
) -> Path:  # fmt: skip
    """Write the page into `folder` atomically and return its path. Pictures that cannot be shown are noted.

    around: neighbours of the samples, where they were asked for. listed: all samples that those name, by id.
    """
    folder.mkdir(exist_ok=True)
    ids = [sample.sample_id for sample in samples]
    pictures = read_pictures(inspection.dataset, [*ids, *listed], inspection.notes) if inspection.dataset else {}
    uris = data_uris(pictures, neighbours := listed_ids(around.values()), MAX_BYTES)
    if neighbours and pictures and not uris:
        inspection.notes.append("There is no room for pictures of neighbours on the page; ask for fewer.")
    cards = Cards(listed, uris, LONGEST_TEXTS[-1])
    parts = {}
    for sample in samples:
        parts[f"Sample {sample.sample_id}"] = _part(inspection, sample, pictures)
        if found := around.get(sample.sample_id):
            parts[f"Sample {sample.sample_id}"] += neighbour_sheets(sample, found, cards)
    name, lede = inspection.run.path.resolve().name, f"Everything recorded about {len(ids):,} samples."
    shown = summary.what(inspection, survey) if survey else ""
    html = document("Samples of {}", name, lede, shown, inspection.notes, parts)
    path = folder / (_prefix(inspection) + SAMPLES_PAGE)
    write_atomically(path, html.encode())
    return path


def _part(inspection: Inspection, sample: Sample, pictures: Mapping[int, bytes]) -> str:
    content = ""
    if jpeg := pictures.get(sample.sample_id):
        uri, words = data_uri(jpeg, "image/jpeg"), f"picture of sample {sample.sample_id}"
        content = f'<p class="picture"><img src="{uri}" alt="{words}"></p>'
    content += facts_list(facts(sample))
    if not sample.history:
        return content
    if inspection.sides:
        caption = (
            f"Tau of sample {sample.sample_id} at every snapshot ({len(sample.history)}); hollow before its first "
            f"visit. {summary.settings(inspection)}."
        )
        draw = partial(draw_history, sample.history, inspection.sides)
        content += figure(draw, f"Tau of sample {sample.sample_id}", caption)
    return content + table("Its state at every snapshot.", *history_table(sample))


def history_table(sample: Sample) -> tuple[list[str], list[Row]]:
    """Return head and rows of a table, one row per snapshot (at least one), oldest first."""
    rows: list[Row] = [
        [at.snapshot.tag, *(Cell(number(value), float(value)) for value in at.values.values())] for at in sample.history
    ]
    return ["snapshot", *map(state_word, sample.history[0].values)], rows
