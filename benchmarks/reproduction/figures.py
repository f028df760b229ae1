"""The page's pictures, as PNG bytes.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; what a picture shows is in a table too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .comparison import ALL, Comparison, Estimate
from .plan import BASELINES, METHOD, MODES, WORDS, Mode
from .results import DECIDES, Result
from .schedule import BATCHES, DRAWN, SEEDS, SWEPT, compared, for_tau

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7")
INK, GRID, MUTED = "#33373d", "#e3e5e8", "#8a9099"


def draw(picture: str, runs: Comparison) -> bytes | None:
    """The picture of a group of claims; None where no run is made that it would show."""
    panels = {"methods": _methods, "temperatures": _temperatures, "drawings": _drawings, "batches": _batches}
    return panels[picture](runs)


def _methods(runs: Comparison) -> bytes | None:
    """Every method's score, and in the tail, beside what nothing has trained."""

    def panel(axes: Axes, mode: Mode) -> bool:
        every = {method.label: found for method in compared(mode) if (found := runs.seeds(method))}
        labels = [*every]
        for y, label in enumerate(reversed(labels)):
            for band, face in ((ALL, COLOURS[0]), ("tail", "white")):
                _dot(axes, runs.mean(every[label], band=band), y, COLOURS[0], face)
        for name, style in zip(BASELINES, (":", "--"), strict=True):
            floor = runs.baseline(mode, name, "long-tailed")
            if floor is not None and (share := floor.share(DECIDES[mode])) is not None:
                axes.axvline(100 * share, color=MUTED, linestyle=style, label=name.replace("_", " "))
        axes.set_yticks(range(len(labels)), labels[::-1])
        axes.set_ylim(-0.6, 1.14 * len(labels) - 0.4)  # with room for the legend
        axes.set_xlabel("right, %")
        axes.set_title(f"{WORDS[mode]}: {DECIDES[mode].label}; hollow: in the tail", loc="left")
        return bool(labels)

    return figure((9.0, 3.6), [lambda axes, mode=mode: panel(axes, mode) for mode in MODES])  # type: ignore[misc]


def _dot(axes: Axes, estimate: Estimate | None, y: float, colour: str, face: str) -> None:
    if estimate is not None:
        axes.errorbar(estimate.points, y, xerr=estimate.noise, fmt="o", color=colour, markerfacecolor=face, zorder=3)


def _temperatures(runs: Comparison) -> bytes | None:
    """Every class's mean tau by its number of samples."""

    def panel(axes: Axes, mode: Mode) -> bool:
        seeds = runs.all(map(for_tau, SEEDS[mode])) if mode == "unimodal" else runs.seeds(METHOD[mode, "isogclr"])
        return _by_class(axes, seeds, WORDS[mode])

    return figure((9.0, 3.2), [lambda axes, mode=mode: panel(axes, mode) for mode in MODES])  # type: ignore[misc]


def _drawings(runs: Comparison) -> bytes | None:
    """Every folder's mean tau by its number of drawings."""
    (isogclr,) = (method for method in DRAWN if method.name == "isogclr")
    return figure((6.0, 3.2), [lambda axes: _by_class(axes, runs.seeds(isogclr), "drawings")])


def _by_class(axes: Axes, seeds: Sequence[Result], title: str) -> bool:
    for number, result in enumerate(seeds[: len(COLOURS)]):
        for (name, side), marker in zip(result.temperatures.items(), "o^", strict=False):
            words = ("" if name == "sample" else f"{name}, ") + f"seed {result.run.settings['seed']}"
            axes.plot(side.sizes, side.class_means, marker, color=COLOURS[number], markersize=3, label=words)
    axes.set_xscale("log")
    axes.set_xlabel("samples of the class")
    axes.set_ylabel("mean tau of the class")
    axes.set_title(title, loc="left")
    return bool(seeds)


def _batches(runs: Comparison) -> bytes | None:
    """Accuracy by batch size, as the papers draw it."""

    def panel(axes: Axes) -> bool:
        found = False
        for place, (name, colour) in enumerate(zip(SWEPT, COLOURS, strict=False)):
            aside = 2 ** (0.08 * (place - len(SWEPT) / 2))  # so that no error bar hides another
            reached = {batch: runs.mean(runs.swept(name, batch)) for batch in BATCHES}
            known = {batch: estimate for batch, estimate in reached.items() if estimate is not None}
            found = found or len(known) > 1
            heights, errors = [each.points for each in known.values()], [each.noise for each in known.values()]
            places = [aside * batch for batch in known]
            axes.errorbar(places, heights, yerr=errors, marker="o", color=colour, elinewidth=1, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
        axes.set_xlabel("batch size")
        axes.set_ylabel("linear probe, %")
        return found

    return figure((6.0, 3.4), [panel])


def figure(size: tuple[float, float], panels: Sequence[Callable[[Axes], bool]]) -> bytes | None:
    """Panels side by side; None where all of them are empty."""
    settings: dict[Any, Any] = {
        "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "text.color": INK, "axes.labelcolor": INK,
        "xtick.color": INK, "ytick.color": INK, "legend.frameon": False,
    }  # fmt: skip
    png = BytesIO()
    with matplotlib.rc_context(settings):
        figure = Figure(size, facecolor="#ffffff", layout="constrained")
        every = list(figure.subplots(1, len(panels), squeeze=False).ravel())
        shown = [panel(axes) for axes, panel in zip(every, panels, strict=True)]
        if not any(shown):
            return None
        for axes, is_shown in zip(every, shown, strict=True):
            if not is_shown:
                axes.text(0.5, 0.5, "not run yet", transform=axes.transAxes, ha="center", color=MUTED)
            axes.grid(linewidth=0.8, color=GRID, zorder=0)
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(GRID)
            axes.tick_params(length=0)
        _add_legends(every)
        figure.savefig(png, format="png", dpi=120, metadata={"Software": None})
    return png.getvalue()


def _add_legends(panels: Sequence[Axes]) -> None:
    """One beside the last panel where it holds for all, else one in each."""
    labels = [axes.get_legend_handles_labels()[1] for axes in panels]
    if all(of_one == labels[-1] for of_one in labels):
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        panels = panels[-1:] if labels[-1] else ()
    else:
        place = {"loc": "best", "fontsize": 7}
    for axes in panels:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(**place)
