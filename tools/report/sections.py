"""The page's sections but those on groups: figures with captions, tables, contact sheets."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..inspection import summary
from ..inspection.drift import Drift
from ..inspection.embedding_map import EmbeddingMap
from ..inspection.run import Inspection
from ..inspection.survey import Sheet, Survey
from ..inspection.through_time import QUANTILES, ThroughTime
from ..inspection.whole_run import Doubted
from .figures.embedding_map import colour_legend, draw_embedding_map
from .figures.histograms import Panel, draw_drift, draw_histograms, draw_joint, draw_tau_histograms
from .figures.over_time import draw_share, draw_tau_over_time
from .html import Cell, Row, count, figure, per_side, table, text
from .sheets import Cards


def distribution(inspection: Inspection, survey: Survey) -> str:
    shown = summary.what(inspection, survey)
    draw = partial(draw_tau_histograms, survey.sides, inspection.tau.start)
    content = figure(draw, "Histograms of tau", f"Number of samples by tau. {shown}.")
    head = [summary.head(inspection), *(side.name for side in survey.sides)]
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
    number, side = len(sheet.sample_ids), sheet.side
    title = f"{side.name}: the {number} samples with the {sheet.end} tau" if side else (
        f"{number} random samples, for comparison")  # fmt: skip
    names = [each.name for each in ([side] if side else survey.sides)]
    shown = []
    for id in sheet.sample_ids:
        state = cards.samples[id].state
        figure = f"tau {per_side({name: summary.tau(state[f'{name}/tau']) for name in names})}"
        if side and sheet.tie_broken_by_log_s:
            figure += f", log s {state[f'{side.name}/log_s']:+.2f}"
        shown.append((id, figure))
    return cards.sheet(title, _of_ties(sheet), shown)


def _of_ties(sheet: Sheet) -> str:
    """Return how many samples have the same tau as the last one of a sheet, and how equals are ordered."""
    words = []
    if sheet.not_shown:
        words.append(f"{sheet.not_shown:,} more samples have the same tau as the last one here.")
    if sheet.tie_broken_by_log_s:
        words.append(f"Samples with the same tau are ordered by log s, the {sheet.end} first.")
    elif sheet.not_shown:
        words.append("The lowest ids are shown.")
    return " ".join(words)


def embedding_map(inspection: Inspection, survey: Survey, found: EmbeddingMap) -> str:
    """Return the t-SNE map of the embeddings, with class names in the text below it."""
    drawn, seen = ("stratified by class", "by tau and by class") if found.colouring else ("stratified by tau", "by tau")
    caption = (
        f"t-SNE (perplexity {found.perplexity:g}) of the features of {len(found.sample_ids):,} samples, {drawn}, plus "
        f"the coldest and the hottest, by the {found.weights} weights of checkpoint {found.checkpoint}. Triangles mark "
        "the lowest and the highest tau; among equals, the lowest ids. Distances between far points mean nothing. "
        f"{summary.what(inspection, survey)}."
    )
    content = figure(partial(draw_embedding_map, found, survey.sides), f"Map of the embeddings {seen}", caption)
    if found.colouring and found.colouring.are_classes:
        names = [f"{drawn}: {name}" for _, drawn, name in colour_legend(found.colouring)]
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


def doubted(found: Doubted) -> str:
    caption = (
        "Share of the pairs with log s, summed over the sides, above 0, at every snapshot: once doubt_after epochs are "
        f"done, the loss leaves them out. Those of the last one are misfits or stuck. {summary.came_back(found)}."
    )
    return figure(partial(draw_share, found.shares, "share of the pairs"), "Doubted pairs over the run", caption)


def through_time(inspection: Inspection, found: ThroughTime) -> str:
    steps = [moment.snapshot.step for moment in found.moments]
    caption = (
        f"Quantiles of tau over the samples visited by then, at every snapshot with visited samples ({len(steps)}), "
        f"step {steps[0]:,} to {steps[-1]:,}; {found.samples_read:,} samples of each"
    )
    if found.every > 1:
        caption += f", one in {found.every} blocks of the state"
    caption += f". {summary.settings(inspection)}."
    content = figure(partial(draw_tau_over_time, found), "Tau over the steps of the run", caption)
    words = [_last_move(found, side) for side in found.sides] if len(found.moments) > 1 else []
    said = f"<p>{text(' '.join(words), most=1000)}</p>" if words else ""
    return content + said + _moments(found)


def _last_move(found: ThroughTime, side: str) -> str:
    """Describe how far the quantiles moved since the previous snapshot; near 0 tau has settled overall."""
    before, after = found.moments[-2:]
    moved = [
        f"{new / old - 1:+.1%} ({share * 100:g}%)"
        for share, old, new in zip(QUANTILES, before.tau[side].quantiles, after.tau[side].quantiles, strict=True)
    ]
    steps = after.snapshot.step - before.snapshot.step
    return (f"From {before.snapshot.tag} to {after.snapshot.tag}, {steps:,} steps, the quantiles of the {side} "
            f"temperatures moved by {', '.join(moved)}.")  # fmt: skip


def _moments(found: ThroughTime) -> str:
    head = ["snapshot", "step", "visited"]
    for side in found.sides:
        head += [f"{side} {share * 100:g}%" if share != 0.5 else f"{side} median" for share in QUANTILES]
        head.append(f"{side} at tau_min")
    rows: list[Row] = []
    for moment in found.moments:
        row: Row = [moment.snapshot.tag, count(moment.snapshot.step), count(moment.visited)]
        for side in found.sides:
            tau = moment.tau[side]
            row += [Cell(summary.tau(value), value) for value in tau.quantiles]
            row.append(Cell(summary.share(tau.share_at_tau_min), tau.share_at_tau_min))
        rows.append(row)
    return table("Quantiles of tau at every snapshot; tau has no unit.", head, rows)


def drift(inspection: Inspection, found: Drift) -> str:
    caption = (
        f"Tau of every sample at {found.earlier.tag} against its tau at {found.later.tag}; on the dashed line it "
        f"did not change. {found.visited:,} samples were visited by both. {summary.settings(inspection)}."
    )
    content = figure(partial(draw_drift, found), f"Tau at {found.earlier.tag} and at {found.later.tag}", caption)
    title = f"From {found.earlier.tag} to {found.later.tag}; tau has no unit."
    return content + table(title, ["tau", *(side.name for side in found.sides)], summary.drift_table(found))


def movers(found: Drift, cards: Cards) -> str:
    """Return contact sheets of the samples whose tau moved most."""
    return "".join(
        cards.sheet(
            f"{side.name}: samples whose tau {direction} most", "",
            [(mover.sample_id, f"tau {summary.tau(mover.before)} → {summary.tau(mover.after)}") for mover in most],
        )
        for side in found.sides
        for direction, most in (("rose", side.most_risen), ("fell", side.most_fallen))
        if most
    )  # fmt: skip
