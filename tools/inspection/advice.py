"""Warnings about a run's temperatures."""

from __future__ import annotations

from collections.abc import Iterator

from .run import Inspection
from .survey import Side, Survey

MANY_AT_BOUND = 0.5
"""Share of the samples. Some samples at the floor are normal: rare ones."""
SOME_AT_TOP = 0.05
"""Share of the samples. None should be at the ceiling, which is only a safeguard."""
NARROW = 1.1
"""Ratio of the 95 % quantile to the 5 % one; below it the temperatures are practically equal."""
FEW_VISITED = 0.5


def warnings(inspection: Inspection, survey: Survey) -> list[str]:
    """Return warnings that say what was found, what it means and what to try."""
    return [*_coverage(survey), *_not_finite(inspection, survey), *_of_sides(inspection, survey.sides)]


def _coverage(survey: Survey) -> Iterator[str]:
    if 0 < survey.share_visited < FEW_VISITED:
        yield (f"Only {survey.visited:,} of the {survey.samples:,} samples have been visited. All figures cover those; "
               "the others still hold their initial values.")  # fmt: skip


def _not_finite(inspection: Inspection, survey: Survey) -> Iterator[str]:
    for name, values in survey.fields.items():
        if values.not_finite:
            yield (f"{values.not_finite:,} visited samples have a non-finite {name} and are left out. "
                   f"`thermopile state check {inspection.run.path}` lists them.")  # fmt: skip


def _of_sides(inspection: Inspection, sides: list[Side]) -> Iterator[str]:
    settings, bounds = inspection.config.objective.settings, inspection.tau
    rho = settings.get("rho")
    if sides and settings.get("eta") == 0:
        yield "eta is 0: every tau keeps its initial value."
        return
    for side in sides:
        low = side.tau.share_at_most(bounds.lowest) if bounds.lowest is not None else 0.0
        high = side.tau.share_at_least(bounds.highest) if bounds.highest is not None else 0.0
        if low >= MANY_AT_BOUND:
            yield (f"rho{'' if rho is None else f' = {rho:g}'} seems never to bind: {low:.0%} of the {side.name} "
                   f"temperatures are at their floor, tau_min = {bounds.lowest:g}. The weights of their negatives "
                   "never move as far from uniform as rho allows, so nothing raises tau. "
                   "Lower rho or raise the batch size.")  # fmt: skip
        if high >= SOME_AT_TOP:
            yield (f"{high:.0%} of the {side.name} temperatures are at their ceiling, tau_max = {bounds.highest:g}, "
                   "and no longer distinguish these samples. Raise rho or tau_max, or lower eta.")  # fmt: skip
        cold, hot = side.tau.quantile(0.05), side.tau.quantile(0.95)
        if hot < NARROW * cold and low < MANY_AT_BOUND and high < MANY_AT_BOUND:
            yield (f"The {side.name} temperatures hardly differ: 90% lie between {cold:.4f} and {hot:.4f}. "
                   "Train longer or raise eta.")  # fmt: skip
