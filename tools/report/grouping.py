"""The page's words on groups: how tau depends on their size."""

from collections.abc import Mapping

from ..inspection import summary
from ..inspection.summary import per_side
from ..inspection.temperatures.correlation import NEGLIGIBLE, Correlation
from ..inspection.temperatures.groups import TauGroups
from ..inspection.temperatures.survey import Survey

Known = Mapping[str, Correlation]
"""Side -> correlation of group size and mean tau."""


MAX_GROUP_ROWS = 1000
"""More rows make the page slow to open; beyond this, only the largest and the smallest groups are shown."""


def shown(groups: TauGroups) -> list[int]:
    """Return the places of the groups to list."""
    places, half = list(range(len(groups.names))), MAX_GROUP_ROWS // 2
    return places if len(places) <= MAX_GROUP_ROWS else places[:half] + places[-half:]


def known(survey: Survey, groups: TauGroups) -> Known:
    return {side.name: found for side in survey.sides if (found := groups.correlation[side.name])}


def lede(survey: Survey | None) -> str:
    """Return the main finding: in which direction, how strong and how certain."""
    if survey is None or not survey.sides:
        return "There are no temperatures to show."
    groups = survey.groups[0] if survey.groups else None
    found = known(survey, groups) if groups else {}
    if not groups or not found:
        means = per_side({side.name: summary.tau(side.tau.mean) for side in survey.sides})
        return f"The mean temperature tau is {means}."
    visited = int((groups.visited > 0).sum())
    return (
        f"{_relation(list(found.values()), groups.plural)}. Spearman’s correlation of size and mean tau over "
        f"{visited:,} {groups.plural} is {in_words(found)}."
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


def in_words(known: Known) -> str:
    """Return strength, certainty and figures of each side's correlation, with words that all share only once."""
    verdicts = {c.verdict for c in known.values()}
    if len(verdicts) > 1:
        return per_side({side: summary.correlation_in_words(c) for side, c in known.items()})
    return f"{verdicts.pop()}: {per_side({side: summary.correlation_figures(c) for side, c in known.items()})}"


def by_chance(known: Known) -> str:
    """Return the correlations that permuted labels give."""

    def control(found: Correlation) -> str:
        low, high = map(summary.correlation, found.permuted_range or (None, None))
        return f"{summary.correlation(found.permuted)}, from {low} to {high}" if found.permuted_range else low

    return per_side({side: control(found) for side, found in known.items()})
