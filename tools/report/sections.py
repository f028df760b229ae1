"""The page's sections on one snapshot: figures with captions, tables, contact sheets."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..inspection import summary
from ..inspection.embedding_map import EmbeddingMap
from ..inspection.run import Inspection
from ..inspection.samples import Sample
from ..inspection.survey import Sheet, Side, Survey
from .figures.embedding_map import draw_embedding_map, kinds_legend
from .figures.histograms import Panel, draw_histograms, draw_tau_histograms
from .figures.joint import draw_joint
from .html import Cell, Row, count, figure, per_side, table, text
from .sheets import Cards


def distribution(inspection: Inspection, survey: Survey) -> str:
    shown = summary.what(inspection, survey)
    draw = partial(draw_tau_histograms, survey.sides, inspection.tau.start)
    content = figure(draw, "Histograms of tau", f"Number of samples by tau. {shown}.")
    head = ["tau of the visited samples", *(side.name for side in survey.sides)]
    content += table("Temperatures of each side; tau has no unit.", head, summary.table(inspection, survey))
    if survey.joint:
        names = [side.name for side in survey.sides]
        caption = (
            f"Tau of the {names[0]} side against tau of the {names[1]} side. Spearman’s correlation over the "
            f"samples: {summary.correlation(survey.joint.spearman)}. {shown}."
        )
        content += figure(partial(draw_joint, survey.joint, names), "Tau of both sides", caption)
    return content


def moving_averages(inspection: Inspection, survey: Survey) -> str:
    """Return histograms of log s, and of u if the objective has a temperature per sample; empty with neither."""
    content, axes = "", {"log_s": "log s (natural log, no unit)", "u": "u, momentum of tau’s gradient (no unit)"}
    for place, side in enumerate(dict.fromkeys(name.rpartition("/")[0] for name in survey.fields)):
        panels = [
            Panel(f"{side} {name.replace('_', ' ')}", survey.fields[f"{side}/{name}"], axis)
            for name, axis in axes.items()
            if f"{side}/{name}" in survey.fields
        ]
        if panels:
            draw = partial(draw_histograms, panels, "visited samples", place)
            caption = (
                f"{' and '.join(panel.title for panel in panels)}; the lowest and highest 0.5% are in the outermost "
                f"bars. {summary.what(inspection, survey)}."
            )
            content += figure(draw, f"Histograms of the moving averages, {side}", caption)
    return content


def coverage(inspection: Inspection, survey: Survey) -> str:
    """Return histograms of how often and how long ago the samples were visited."""
    panels = [
        Panel("visits", survey.visits, "visits (steps that updated the sample)", whole_numbers=True),
        Panel("staleness", survey.staleness, "staleness (steps since the last visit)", whole_numbers=True),
    ]
    caption = (
        f"Visits of every sample, and steps since the last visit of the visited ones: half were visited within the "
        f"last {survey.staleness.quantile(0.5):,.0f} steps. {summary.what(inspection, survey)}."
    )
    draw = partial(draw_histograms, panels, "samples", 0)
    return figure(draw, "Histograms of visits and staleness", caption)


def sheets(survey: Survey, cards: Cards) -> str:
    return "".join(_sheet(sheet, survey, cards) for sheet in survey.sheets)


def _sheet(sheet: Sheet, survey: Survey, cards: Cards) -> str:
    number, side, words = len(sheet.sample_ids), sheet.side, ""
    title = f"{side.name}: the {number} samples with the {sheet.end} tau" if side else (
        f"{number} random samples, for comparison")  # fmt: skip
    if sheet.not_shown:
        words = f"{sheet.not_shown:,} more samples have the same tau as the last one here; the lowest ids are shown."
    shown = [side] if side else survey.sides
    return cards.sheet(title, words, [(id, _tau_words(cards.samples[id], shown)) for id in sheet.sample_ids])


def _tau_words(sample: Sample, sides: list[Side]) -> str:
    return f"tau {per_side({side.name: summary.tau(sample.state[f'{side.name}/tau']) for side in sides})}"


def embedding_map(inspection: Inspection, survey: Survey, found: EmbeddingMap) -> str:
    """Return the t-SNE map of the embeddings, with class names in the text below it."""
    drawn, seen = ("stratified by class", "by tau and by class") if found.kinds else ("stratified by tau", "by tau")
    caption = (
        f"t-SNE (perplexity {found.perplexity:g}) of the features of {len(found.sample_ids):,} samples, {drawn}, plus "
        f"the coldest and the hottest, by the encoders of checkpoint {found.checkpoint}. Triangles mark the lowest and "
        "the highest tau; among equals, the lowest ids. Distances between far points mean nothing. "
        f"{summary.what(inspection, survey)}."
    )
    content = figure(partial(draw_embedding_map, found, survey.sides), f"Map of the embeddings {seen}", caption)
    if found.kinds and found.kinds.are_classes:
        names = [f"{drawn}: {name}" for _, drawn, name in kinds_legend(found.kinds)]
        content += f"<p><bdi>{text('; '.join(names), most=2000)}</bdi></p>"
    return content + _similarities(found)


def _similarities(found: EmbeddingMap) -> str:
    """Return image-caption similarities of the coldest and hottest samples: iSogCLR Figure 6, right, in numbers."""
    if found.similarity is None:
        return ""
    rows = [_similarity_row("all on the map", found.similarity)]
    for side, points in found.points.items():
        for word, marked in (("lowest", points.coldest), ("highest", points.hottest)):
            if marked.any():
                rows.append(_similarity_row(f"{side}: {word} tau", found.similarity[marked]))
    return table(
        "Cosine similarity of each picture and its caption.", ["samples", "count", "mean", "standard deviation"], rows
    )


def _similarity_row(name: str, values: NDArray[np.float32]) -> Row:
    mean, deviation = float(values.mean()), float(values.std())
    return [name, count(len(values)), Cell(f"{mean:.3f}", mean), Cell(f"{deviation:.3f}", deviation)]
