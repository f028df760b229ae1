"""The pages' tables: their heads and rows, whose numbers are sorted by value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..inspection import summary
from ..inspection.embedding_map import EmbeddingMap
from ..inspection.groups import Groups
from ..inspection.samples import Sample
from ..inspection.survey import Side
from ..inspection.through_time import QUANTILES, ThroughTime
from .sheets import number, state_word

MAX_GROUP_ROWS = 1000
"""More rows make the page slow to open; beyond this, only the largest and the smallest groups are shown."""


class Cell(NamedTuple):
    """A number: shown text and sort value; None sorts last in both directions."""

    shown: str
    value: float | None


Row = list[str | Cell]
Table = tuple[list[str], list[Row]]
"""Head and rows; the first column names the rows."""


class Column(NamedTuple):
    """Numbers with their title; None and NaN are shown as `missing`."""

    title: str
    values: Iterable[float | None]
    shown: Callable[[float], str] = "{:,}".format
    missing: str = "–"

    @property
    def cells(self) -> list[Cell]:
        return [
            Cell(self.missing, None) if value is None or np.isnan(value) else Cell(self.shown(value), float(value))
            for value in self.values
        ]


def _table(title: str, names: Sequence[str], columns: Sequence[Column]) -> Table:
    rows = zip(names, *(column.cells for column in columns), strict=True)
    return [title, *(column.title for column in columns)], [list(row) for row in rows]


def by_band(sides: list[Side], groups: Groups) -> Table:
    """Return head, medium and tail."""
    bands, total = [band for band in groups.bands if band.groups], int(groups.sizes.sum())
    columns = [
        Column("groups", [band.groups for band in bands]),
        Column("samples", [band.samples for band in bands]),
        Column("all samples", [band.samples / total for band in bands], _percent),
    ]
    for side in sides:
        tau, name = [band.tau[side.name] for band in bands], side.name
        ends = (groups.tau[name].coldest, groups.tau[name].hottest)
        coldest, hottest = (f"{counts.sum() / groups.visited.sum():.1%}" for counts in ends)
        columns += [
            Column(f"{name} tau", [of_band.mean for of_band in tau], summary.tau),
            Column("±95%", [of_band.half_width for of_band in tau], summary.tau),
            Column(f"coldest {coldest} ({name})", [of_band.share_of_coldest for of_band in tau], _percent),
            Column(f"hottest {hottest} ({name})", [of_band.share_of_hottest for of_band in tau], _percent),
        ]
    return _table(f"third of the {'classes' if groups.word == 'class' else 'groups'}", [b.name for b in bands], columns)


def by_group(sides: list[Side], groups: Groups) -> Table:
    """Return the groups, or the largest and the smallest MAX_GROUP_ROWS / 2."""
    places, half = np.arange(len(groups.names)), MAX_GROUP_ROWS // 2
    if len(places) > MAX_GROUP_ROWS:
        places = np.concatenate([places[:half], places[-half:]])
    visited = groups.visited[places]
    columns = [Column("samples", groups.sizes[places]), Column("visited", visited)]
    for side in sides:
        tau = groups.tau[side.name]
        columns += [
            Column(f"{side.name} tau", tau.mean[places], summary.tau),
            Column("±95%", tau.half_width[places], summary.tau),
            Column(f"{side.name} coldest", tau.coldest[places] / np.where(visited, visited, np.nan), _percent),
            Column(f"{side.name} hottest", tau.hottest[places] / np.where(visited, visited, np.nan), _percent),
        ]
    return _table(groups.word, [groups.names[place] for place in places], columns)


def through_time(found: ThroughTime) -> Table:
    """Return quantiles of tau, one row per snapshot."""
    moments = found.moments
    columns = [
        Column("step", [moment.snapshot.step for moment in moments]),
        Column("visited", [moment.visited for moment in moments]),
    ]
    for side in found.sides:
        tau = [moment.tau[side] for moment in moments]
        titles = [f"{side} median" if share == 0.5 else f"{side} {100 * share:g}%" for share in QUANTILES]
        quantiles = zip(*(at.quantiles for at in tau), strict=True)
        columns += [Column(title, at, summary.tau) for title, at in zip(titles, quantiles, strict=True)]
        columns.append(Column(f"{side} at tau_min", [at.share_at_tau_min for at in tau], summary.share, "unknown"))
    return _table("snapshot", [moment.snapshot.tag for moment in moments], columns)


def similarities(found: EmbeddingMap) -> Table:
    """Return image-caption similarities of the coldest and hottest samples: iSogCLR Figure 6, right, in numbers."""
    assert found.similarity is not None
    chosen = {"all on the map": found.similarity}
    for side, points in found.points.items():
        chosen[f"{side}: lowest tau"] = found.similarity[points.coldest]
        chosen[f"{side}: highest tau"] = found.similarity[points.hottest]
    shown = {name: values for name, values in chosen.items() if len(values)}
    columns = [
        Column("count", map(len, shown.values())),
        Column("mean", [float(values.mean()) for values in shown.values()], "{:.3f}".format),
        Column("standard deviation", [float(values.std()) for values in shown.values()], "{:.3f}".format),
    ]
    return _table("samples", list(shown), columns)


def history(sample: Sample) -> Table:
    """Return a sample's state, one row per snapshot (at least one), oldest first."""
    rows: list[Row] = [
        [at.snapshot.tag, *(Cell(number(value), float(value)) for value in at.values.values())] for at in sample.history
    ]
    return ["snapshot", *map(state_word, sample.history[0].values)], rows


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
