"""The page's sections on groups: tau against group size; head, medium and tail; every group."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ..inspection import summary
from ..inspection.correlation import NEGLIGIBLE, Correlation
from ..inspection.groups import MIN_FOR_INTERVAL, Groups
from ..inspection.run import Inspection
from ..inspection.survey import Side, Survey
from .figures.by_group import MAX_INTERVALS, draw_tau_by_group, few_visited
from .html import Cell, Row, count, figure, per_side, table

MAX_GROUP_ROWS = 1000
"""More rows make the page slow to open; beyond this, only the largest and the smallest groups are shown."""


def lede(survey: Survey | None) -> str:
    """Return the main finding: in which direction, how strong and how certain."""
    if survey is None or not survey.sides:
        return "There are no temperatures to show."
    groups = survey.groups[0] if survey.groups else None
    known = {side.name: c for side in survey.sides if (c := groups and groups.correlation[side.name])}
    if not groups or not known:
        means = per_side({side.name: summary.tau(side.tau.mean) for side in survey.sides})
        return f"The mean temperature tau is {means}."
    visited = int((groups.visited > 0).sum())
    return (
        f"{_relation(list(known.values()), groups.plural)}. Spearman’s correlation of size and mean tau over "
        f"{visited:,} {groups.plural} is {_in_words(known)}."
    )


def _relation(correlations: list[Correlation], plural: str) -> str:
    """State a relation only if it is unlikely to be chance, and that it is weak where it is."""
    rises = [c.spearman > 0 for c in correlations]
    clear = all(c.is_likely and c.strength != NEGLIGIBLE for c in correlations)
    if not clear or any(rises) != all(rises):
        return f"Temperatures do not clearly depend on the size of {plural}"
    high, low = ("high", "low") if rises[0] else ("low", "high")
    if all(c.is_strong for c in correlations):
        return f"Frequent {plural} have {high} temperatures, rare ones {low}"
    return f"Frequent {plural} have somewhat {high}er temperatures than rare ones"


def by_group(inspection: Inspection, survey: Survey, groups: Groups) -> str:
    caption = f"{_legend(groups)} {_correlation_words(survey, groups)} {summary.what(inspection, survey)}."
    return figure(partial(draw_tau_by_group, survey.sides, groups), f"Mean tau by {groups.word} size", caption)


def _legend(groups: Groups) -> str:
    """Return what the figure shows."""
    if len(groups.names) > MAX_INTERVALS:
        return (
            f"Each light dot is a {groups.word}: its mean tau against its number of samples, moved sideways a little. "
            f"Dark marks are medians of {groups.plural} of about one size, bars the quartiles."
        )
    words = f"Each dot is a {groups.word}: its mean tau, with its 95% interval, against its number of samples."
    if few_visited(groups).any():
        words += f" Hollow: fewer than {MIN_FOR_INTERVAL} visited samples, too few for an interval."
    return words


def _correlation_words(survey: Survey, groups: Groups) -> str:
    """Return the correlation, unless the page's first sentence gives it, and what chance gives."""
    known = {side.name: c for side in survey.sides if (c := groups.correlation[side.name])}
    if not known:
        return "There is no correlation: that needs visited groups of at least two sizes and two mean temperatures."
    chance = per_side({side: _control(c) for side, c in known.items()})
    words = f"Chance: permuting the samples’ labels 20 times gives correlations of {chance}."
    return words if groups is survey.groups[0] else f"Spearman’s correlation: {_in_words(known)}. {words}"


def _in_words(known: Mapping[str, Correlation]) -> str:
    """Return strength, certainty and figures of each side's correlation, with words that all share only once."""
    verdicts = {c.verdict for c in known.values()}
    if len(verdicts) > 1:
        return per_side({side: summary.correlation_in_words(c) for side, c in known.items()})
    return f"{verdicts.pop()}: {per_side({side: summary.correlation_figures(c) for side, c in known.items()})}"


def _control(found: Correlation) -> str:
    if found.permuted_range is None:
        return summary.correlation(None)
    low, high = map(summary.correlation, found.permuted_range)
    return f"{summary.correlation(found.permuted)}, from {low} to {high}"


def band_table(sides: list[Side], groups: Groups) -> str:
    caption = (
        "Head, medium and tail are thirds of the groups by size. Shares are of all samples, of the coldest (tau up to "
        "the 5% quantile) and of the hottest (from the 95% quantile on); ties can make these more than 5%. A third "
        "with a larger share of the coldest than of all samples is colder than average."
    )
    bands, total = [band for band in groups.bands if band.groups], int(groups.sizes.sum())
    head = [f"third of the {'classes' if groups.word == 'class' else 'groups'}", "groups", "samples", "all samples"]
    rows: list[Row] = [[b.name, count(b.groups), count(b.samples), _share(b.samples / total)] for b in bands]
    for side in sides:
        tau, name = groups.tau[side.name], side.name
        coldest, hottest = (f"{counts.sum() / groups.visited.sum():.1%}" for counts in (tau.coldest, tau.hottest))
        head += [f"{name} tau", "±95%", f"coldest {coldest} ({name})", f"hottest {hottest} ({name})"]
        for row, band in zip(rows, bands, strict=True):
            mean, half_width, *shares = band.tau[name]
            row += [_tau(mean), _tau(half_width), *map(_share, shares)]
    return table(caption, head, rows)


def group_table(sides: list[Side], groups: Groups) -> str:
    places, word, half = list(range(len(groups.names))), groups.word, MAX_GROUP_ROWS // 2
    caption = (
        f"Mean tau by {word}, {len(places):,} in all, largest first, and the share of each one’s samples among the "
        "coldest and the hottest of all (iSogCLR Figure 5, left)."
    )
    if few_visited(groups).any():
        caption += f" ±95% needs {MIN_FOR_INTERVAL} visited samples."
    if len(places) > MAX_GROUP_ROWS:
        places = places[:half] + places[-half:]
        caption += f" Only the {half:,} largest and the {half:,} smallest are shown."
    head = [word, "samples", "visited"]
    rows: list[Row] = [[groups.names[i], count(groups.sizes[i]), count(groups.visited[i])] for i in places]
    for side in sides:
        head += [f"{side.name} tau", "±95%", f"{side.name} coldest", f"{side.name} hottest"]
        for row, place in zip(rows, places, strict=True):
            visited = groups.visited[place]
            mean, half_width, *ends = (values[place] for values in groups.tau[side.name])
            row += [_tau(mean), _tau(half_width), *(_share(float(end / visited) if visited else None) for end in ends)]
    return table(caption, head, rows)


def _tau(value: float | None) -> Cell:
    return Cell("–", None) if value is None or np.isnan(value) else Cell(summary.tau(value), float(value))


def _share(value: float | None) -> Cell:
    return Cell("–" if value is None else f"{100 * value:.1f}%", value)
