"""The page's sections, each a function of what was found: figures with their captions, tables, contact sheets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ..inspection import summary
from ..inspection.details import Details
from ..inspection.embedding_map import EmbeddingMap
from ..inspection.findings import Findings
from ..inspection.groups import Band, Groups
from ..inspection.run import LABELS
from ..inspection.survey import Sheet, Side, Survey
from .figures.by_group import draw_tau_by_group
from .figures.embedding_map import draw_embedding_map, kinds_legend
from .figures.histograms import Panel, draw_histograms, draw_joint, draw_tau_histograms
from .figures.style import Draw
from .html import Cell, figure, table, text
from .sheets import Cards

MOST_GROUP_ROWS = 2000
"""A page with more rows is slow to open; of more groups, the largest and the smallest are shown."""
CLEAR_CORRELATION = 0.5


def what(findings: Findings) -> str:
    """What a figure shows: how many samples, of which snapshot, with which settings. There is a snapshot."""
    inspection, survey = findings.inspection, findings.survey
    assert inspection.reader is not None
    assert survey is not None
    return (f"{survey.visited:,} visited of {survey.samples:,} samples, {inspection.reader.snapshot.tag}, "
            f"{summary.settings(inspection)}")  # fmt: skip


def draw_by_group(survey: Survey, groups: Groups) -> Draw:
    """The figure that leads to the method's claim."""
    return partial(draw_tau_by_group, survey.sides, groups)


def by_group(findings: Findings, survey: Survey, groups: Groups) -> str:
    caption = f"Each dot is a {groups.word}: its mean tau"
    if len(groups.names) <= 200:
        caption += ", with its 95% interval,"
    caption += f" against its number of samples. {correlation_words(survey.sides, groups)} {what(findings)}."
    return figure(draw_by_group(survey, groups), f"Mean tau by {groups.word} size", caption)


def correlation_words(sides: list[Side], groups: Groups) -> str:
    known = {side.label: c for side in sides if (c := groups.correlation[side.name])}
    if not known:
        return "There is no correlation: it takes visited groups of two sizes at least, with two mean temperatures."
    return (
        f"Spearman’s correlation: {per_side({k: summary.correlation(c.spearman) for k, c in known.items()})}; "
        f"p-value: {per_side({k: summary.p_value(c.p_value) for k, c in known.items()})}; with the samples’ labels "
        f"permuted, mean of 20: {per_side({k: summary.correlation(c.permuted) for k, c in known.items()})}."
    )


def per_side(figures: dict[str, str]) -> str:
    """`+0.93 (image) and +0.92 (text)`; of one side, the figure alone."""
    if len(figures) == 1:
        return next(iter(figures.values()))
    return " and ".join(f"{figure} ({label})" for label, figure in figures.items())


def lede(survey: Survey | None) -> str:
    """What is seen, in one sentence."""
    if survey is None or not survey.sides:
        return "There are no temperatures to show."
    groups = survey.groups[0] if survey.groups else None
    known = {side.label: c for side in survey.sides if (c := groups and groups.correlation[side.name])}
    if not groups or not known:
        means = per_side({side.label: summary.tau(side.tau.mean) for side in survey.sides})
        return f"The mean temperature tau is {means}."
    figures = per_side({label: summary.correlation(c.spearman) for label, c in known.items()})
    word = groups.word
    return (
        f"{_relation([c.spearman for c in known.values()], word)}: over {len(groups.names):,} of them, Spearman’s "
        f"correlation of size and mean tau is {figures}."
    )


def _relation(correlations: list[float], word: str) -> str:
    plural = {"class": "classes"}.get(word, f"groups by {word}")
    if all(value >= CLEAR_CORRELATION for value in correlations):
        return f"Frequent {plural} have high temperatures, rare ones low"
    if all(value <= -CLEAR_CORRELATION for value in correlations):
        return f"Frequent {plural} have low temperatures, rare ones high"
    return f"Temperatures do not clearly follow the size of {plural}"


def distribution(findings: Findings, survey: Survey) -> str:
    shown = what(findings)
    draw = partial(draw_tau_histograms, survey.sides, findings.inspection.tau.start)
    content = figure(draw, "Histograms of tau", f"How many samples have which tau. {shown}.")
    head = ["tau of the visited samples", *(side.label for side in survey.sides)]
    rows = [[row.label, *row.cells] for row in summary.table(findings.inspection, survey)]
    content += table("Temperatures of each side; tau has no unit.", head, rows)
    if survey.joint:
        labels = [side.label for side in survey.sides]
        caption = (
            f"Tau of the {labels[0]} side against tau of the {labels[1]} side. Spearman’s correlation over the "
            f"samples: {summary.correlation(survey.joint.spearman)}. {shown}."
        )
        content += figure(partial(draw_joint, survey.joint, labels), "Tau of both sides", caption)
    return content


def rest_of_state(findings: Findings, survey: Survey) -> str:
    """log s and u of both sides."""
    content, names = "", {"log_s": "log s (natural log, no unit)", "u": "u, momentum of tau’s gradient (no unit)"}
    for place, side in enumerate(survey.sides):
        panels = [
            Panel(f"{side.label} {name.replace('_', ' ')}", survey.fields[f"{side.name}/{name}"], axis)
            for name, axis in names.items()
            if f"{side.name}/{name}" in survey.fields
        ]
        if panels:
            draw = partial(draw_histograms, panels, "visited samples", place)
            caption = (
                f"The moving average s and the momentum u of the {side.label} side; the lowest and the highest 0.5% are "
                f"in the outermost bars. {what(findings)}."
            )
            content += figure(draw, f"Histograms of log s and u, {side.label}", caption)
    return content


def coverage(findings: Findings, survey: Survey) -> str:
    """How often, and how long ago, the samples were visited."""
    panels = [
        Panel("visits", survey.visits, "visits (steps that updated the sample)", whole_numbers=True),
        Panel("staleness", survey.staleness, "staleness (steps since the last visit)", whole_numbers=True),
    ]
    caption = (
        f"How often all samples were visited, and how long ago the visited ones were: half of them within the last "
        f"{survey.staleness.quantile(0.5):,.0f} steps. {what(findings)}."
    )
    draw = partial(draw_histograms, panels, "samples", 0)
    return figure(draw, "Histograms of visits and staleness", caption)


def sheets(survey: Survey, cards: Cards) -> str:
    return "".join(cards.sheet(*_titled(sheet, survey, cards.details)) for sheet in survey.sheets)


def _titled(sheet: Sheet, survey: Survey, details: Mapping[int, Details]) -> tuple[str, str, list[tuple[int, str]]]:
    count, side = len(sheet.sample_ids), sheet.side
    if side is None:
        title, words = f"{count} random samples, to compare with", ""
    else:
        title = f"{side.label}: the {count} samples with the {sheet.end} tau"
        words = (f"{sheet.not_shown:,} more have the same tau as the last one here, and higher ids."
                 if sheet.not_shown else "")  # fmt: skip
    shown = [side] if side else survey.sides
    return title, words, [(id, _tau_words(details[id], shown)) for id in sheet.sample_ids]


def _tau_words(details: Details, sides: list[Side]) -> str:
    taus = {side.label: summary.tau(details.state[f"{side.name}/tau"]) for side in sides}
    return f"tau {per_side(taus)}"


def group_tables(survey: Survey, groups: Groups) -> str:
    return _band_table(survey.sides, groups) + _group_table(survey.sides, groups)


def _band_table(sides: list[Side], groups: Groups) -> str:
    word = groups.word
    head = [f"third of the {word}es" if word == "class" else "third of the groups", "groups", "samples", "all samples"]
    for side in sides:
        head += [
            f"{side.label} tau",
            "± 95%",
            f"coldest 5% ({side.label})",
            f"hottest 5% ({side.label})",
        ]
    caption = (
        "Head, medium and tail: the groups by size, cut in three, and what share of all samples, of the coldest 5% and "
        "of the hottest 5% each third holds. One that holds more of the coldest than of all is colder than most."
    )
    total = int(groups.sizes.sum())
    return table(caption, head, [_band_row(band, sides, total) for band in groups.bands if band.groups])


def _band_row(band: Band, sides: list[Side], total: int) -> list[str | Cell]:
    row: list[str | Cell] = [band.name, _count(band.groups), _count(band.samples), _share(band.samples / total)]
    for side in sides:
        tau = band.tau[side.name]
        row += [_tau(tau.mean), _tau(tau.half_width), _share(tau.share_of_coldest), _share(tau.share_of_hottest)]
    return row


def _group_table(sides: list[Side], groups: Groups) -> str:
    places, word = list(range(len(groups.names))), groups.word
    caption = f"Mean tau of {len(places):,} {'classes' if word == 'class' else 'groups'}, the largest first."
    if len(places) > MOST_GROUP_ROWS:
        places = places[: MOST_GROUP_ROWS // 2] + places[-MOST_GROUP_ROWS // 2 :]
        half = MOST_GROUP_ROWS // 2
        caption += f" Shown are the {half:,} largest and the {half:,} smallest."
    head = [word, "samples", "visited"]
    for side in sides:
        head += [f"{side.label} tau", "± 95%"]
    return table(caption, head, [_group_row(groups, place, sides) for place in places])


def _group_row(groups: Groups, place: int, sides: list[Side]) -> list[str | Cell]:
    row: list[str | Cell] = [groups.names[place], _count(groups.sizes[place]), _count(groups.visited[place])]
    for side in sides:
        tau = groups.tau[side.name]
        row += [_tau(tau.mean[place]), _tau(tau.half_width[place])]
    return row


def _count(number: int) -> Cell:
    return Cell(f"{number:,}", int(number))


def _tau(value: float | None) -> Cell:
    known = value is not None and not np.isnan(value)
    return Cell(summary.tau(value), float(value)) if known else Cell("–", None)  # type: ignore[arg-type]


def _share(value: float | None) -> Cell:
    return Cell("–" if value is None else f"{100 * value:.1f}%", value)


def embedding_map(findings: Findings, found: EmbeddingMap) -> str:
    """Where the encoders put the samples: t-SNE, with the kinds of samples named as the data names them."""
    caption = (
        f"t-SNE (perplexity {found.perplexity:g}) of the features of {len(found.sample_ids):,} samples, drawn so that "
        f"rare classes are there, by the encoders of the checkpoint {found.checkpoint}. Triangles: the samples "
        f"with the lowest and the highest tau. Distances between far points mean nothing. {what(findings)}."
    )
    content = figure(partial(draw_embedding_map, found, findings.survey.sides if findings.survey else []),
                     "Map of the embeddings by tau and by class", caption)  # fmt: skip
    if found.kinds and found.kinds.are_classes:
        names = [f"{drawn}: {name}" for _, drawn, name in kinds_legend(found.kinds)]
        content += f"<p><bdi>{text('; '.join(names), most=2000)}</bdi></p>"
    return content + _similarities(found)


def _similarities(found: EmbeddingMap) -> str:
    """How alike the coldest and the hottest pictures and captions are: iSogCLR Figure 6, right, in numbers."""
    if found.similarity is None:
        return ""
    rows: list[list[str | Cell]] = [
        ["all on the map", Cell(f"{found.similarity.mean():.3f}", float(found.similarity.mean()))]
    ]
    for side, points in found.points.items():
        for word, marked in (("lowest", points.coldest), ("highest", points.hottest)):
            if marked.any():
                mean = float(found.similarity[marked].mean())
                rows.append([f"{LABELS.get(side, side)}: {word} tau", Cell(f"{mean:.3f}", mean)])
    return table("Cosine of a picture and its own caption, mean.", ["samples", "cosine"], rows)
