"""The page's sections on groups: tau against group size; head, medium and tail; every group."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..inspection import summary
from ..inspection.correlation import Correlation
from ..inspection.groups import Groups
from ..inspection.run import Inspection
from ..inspection.survey import Side, Survey
from .figures.by_group import MAX_INTERVALS, draw_tau_by_group
from .html import Cell, Row, count, figure, per_side, table

MAX_GROUP_ROWS = 1000
"""More rows make the page slow to open; beyond this, only the largest and the smallest groups are shown."""
CLEAR_CORRELATION, CLEAR_P_VALUE = 0.5, 0.05


def lede(survey: Survey | None) -> str:
    """Return the main finding in one sentence."""
    if survey is None or not survey.sides:
        return "There are no temperatures to show."
    groups = survey.groups[0] if survey.groups else None
    known = {side.name: c for side in survey.sides if (c := groups and groups.correlation[side.name])}
    if not groups or not known:
        means = per_side({side.name: summary.tau(side.tau.mean) for side in survey.sides})
        return f"The mean temperature tau is {means}."
    figures = per_side({side: summary.correlation(c.spearman) for side, c in known.items()})
    visited = int((groups.visited > 0).sum())
    return (
        f"{_relation(list(known.values()), groups.plural)}: across {visited:,} {groups.plural}, Spearman’s correlation "
        f"of size and mean tau is {figures}."
    )


def _relation(correlations: list[Correlation], plural: str) -> str:
    """State a relation only if it is unlikely to be chance."""
    clear = all(abs(c.spearman) >= CLEAR_CORRELATION and c.p_value < CLEAR_P_VALUE for c in correlations)
    if clear and all(c.spearman > 0 for c in correlations):
        return f"Frequent {plural} have high temperatures, rare ones low"
    if clear and all(c.spearman < 0 for c in correlations):
        return f"Frequent {plural} have low temperatures, rare ones high"
    return f"Temperatures do not clearly depend on the size of {plural}"


def by_group(inspection: Inspection, survey: Survey, groups: Groups) -> str:
    interval = ", with its 95% interval," if len(groups.names) <= MAX_INTERVALS else ""
    caption = (
        f"Each dot is a {groups.word}: its mean tau{interval} against its number of samples. "
        f"{_correlation_words(survey.sides, groups)} {summary.what(inspection, survey)}."
    )
    return figure(partial(draw_tau_by_group, survey.sides, groups), f"Mean tau by {groups.word} size", caption)


def _correlation_words(sides: list[Side], groups: Groups) -> str:
    known = {side.name: c for side in sides if (c := groups.correlation[side.name])}
    if not known:
        return "There is no correlation: that needs visited groups of at least two sizes and two mean temperatures."
    return (
        f"Spearman’s correlation: {per_side({k: summary.correlation(c.spearman) for k, c in known.items()})}; "
        f"p-value: {per_side({k: summary.p_value(c.p_value) for k, c in known.items()})}; by chance, with the "
        f"samples’ labels permuted 20 times: {per_side({k: _control(c) for k, c in known.items()})}."
    )


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
