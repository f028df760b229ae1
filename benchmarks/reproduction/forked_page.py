"""The tables of the page on experiments: what forks changed, with the paired error beside the unpaired."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from thermopile.storage.files import write_atomically

from ..markdown import table
from .comparison import Comparison, Estimate, in_points
from .figures import COLOURS, MUTED, figure
from .forked import END, POINTS, SEEDS, SHARE, WITHOUT, chosen_class, forked, parts
from .page import wrapped
from .results import Result, Results
from .schedule import missing, runs_of
from .sets import captions_of, test_sources

CAPTION = "Change of R@1 by what is forgotten and from when on, with intervals, paired and unpaired"
WORDS = Path(__file__).with_name("forked_page.md")
LABELS = {
    "swapped": "the wrongly captioned",
    "random": "as many at random",
    "class": "a class",
    "one": "one sample",
}


class Forks:
    """The finished forks. Figures are R@1, the mean of both ways, in points."""

    def __init__(self, results: Results) -> None:
        self._results, self._runs = results, Comparison(results)
        self.data = f"long-tailed@{SHARE}"

    def at(self, point: int, without: str) -> list[Result]:
        """A kind of fork, one for each seed; none before all are made."""
        return self._runs.all(forked(self._results, seed, point, without) for seed in range(SEEDS))

    def change(self, point: int, without: str, of: NDArray[np.bool_] | None = None) -> tuple[Estimate, float] | None:
        """How far the fork is above the run that it is of, and the error if they were not paired.

        of: which test samples to count, bool [m]; None for all.
        """
        fork, whole = (self._runs.right(runs) for runs in (self.at(point, without), self.at(END, "")))
        if fork is None or whole is None:
            return None
        clusters = captions_of(self.data)
        if of is not None:
            fork, whole, clusters = fork[:, of], whole[:, of], clusters[of]
        apart = (in_points(each, clusters).noise for each in (fork, whole))
        return in_points(fork - whole, clusters), math.hypot(*apart)

    def apart(self, point: int, without: str) -> float | None:
        """How many queries of a hundred only one of fork and run answers rightly."""
        fork, whole = (self._runs.right(runs) for runs in (self.at(point, without), self.at(END, "")))
        return None if fork is None or whole is None else float(100 * np.abs(fork - whole).mean())


def write_page(results: Results, path: Path) -> Path:
    """Write the page, Markdown, and its picture beside it; return where the page is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    forks, picture = Forks(results), path.with_suffix(".png")
    if png := figure((6.4, 3.6), [lambda axes: _drawn(axes, forks)]):
        write_atomically(picture, png)
    write_atomically(path, to_markdown(results, picture.name).encode())
    return path


def to_markdown(results: Results, picture: str) -> str:
    """The page's text. picture: file that it shows."""
    forks = Forks(results)
    total, left = len(runs_of(parts(), results)), len(missing(parts(), results))
    values = {
        "forks_table": _changes(forks),
        "drift_table": _drift(forks),
        "class_table": _of_class(forks),
        "picture": f"![{CAPTION}]({picture})",
        "status": f"{total} forks" if not left else f"{total - left} of {total} forks so far",
        "commit": (results.commit or "none")[:12],
        "machines": "; ".join(sorted({f"{m['cpu']}, torch {m['torch']}" for m in (r.machine for r in results)})),
        "share": SHARE,
        "seeds": SEEDS,
    }
    return "\n\n".join(_filled(block, values) for block in WORDS.read_text("utf-8").split("\n\n"))


def _filled(block: str, values: dict[str, object]) -> str:
    """A block with its values; code as it is, braces included."""
    return block if block.startswith("```") else wrapped(block.format_map(values))


def _changes(forks: Forks) -> str:
    rows = [(LABELS[name], *(_cell(forks.change(point, name)) for point in POINTS)) for name in WITHOUT]
    return table(("R@1 without", *(f"from {point} %" for point in POINTS)), rows)


def _drawn(axes: Axes, forks: Forks) -> bool:
    """The first table: intervals, and thin the wider ones without pairing."""
    found = False
    for place, (name, colour) in enumerate(zip(WITHOUT, COLOURS, strict=False)):
        known = {point + 1.6 * (place - 1.5): change for point in POINTS if (change := forks.change(point, name))}
        heights = [change.points for change, _ in known.values()]
        axes.errorbar(
            [*known], heights, yerr=[apart for _, apart in known.values()], fmt="none", ecolor=colour, alpha=0.3
        )
        noise = [change.noise for change, _ in known.values()]
        axes.errorbar([*known], heights, yerr=noise, fmt="o", color=colour, elinewidth=2, label=LABELS[name])
        found = found or bool(known)
    axes.axhline(0, color=MUTED, linewidth=1)
    axes.set_xticks(POINTS, [f"{point} %" for point in POINTS])
    axes.set_xlabel("of the run is done when it forgets")
    axes.set_ylabel("change of R@1, points")
    return found


def _drift(forks: Forks) -> str:
    apart = (forks.apart(point, "one") for point in POINTS)
    every = ([change for name in WITHOUT if (change := forks.change(point, name))] for point in POINTS)
    shares = (fmean(change.noise / error for change, error in of_point) if of_point else None for of_point in every)
    rows = [
        ("queries that one sample decides, %", *("–" if each is None else f"{each:.1f}" for each in apart)),
        ("paired error, share of the unpaired", *("–" if each is None else f"{each:.2f}" for each in shares)),
    ]
    return table(("fork", *(f"from {point} %" for point in POINTS)), rows)


def _of_class(forks: Forks) -> str:
    classes = np.concatenate([source.groups().of_sample for source in test_sources(forks.data)])
    is_chosen = classes == chosen_class(forks.data)
    rows = [(name, *(_cell(forks.change(point, "class", of)) for point in POINTS))
            for name, of in (("its own test samples", is_chosen), ("all others", ~is_chosen))]  # fmt: skip
    return table(("R@1 without a class", *(f"from {point} %" for point in POINTS)), rows)


def _cell(found: tuple[Estimate, float] | None) -> str:
    if found is None:
        return "–"
    change, apart = found
    return f"{change.points:+.1f} ± {change.noise:.1f} ({apart:.1f})".replace("-", "−")
