"""A measured figure beside its alternative and what was asked of it; pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured number, and the same of the alternative where there is one."""

    name: str
    """Its key in JSON."""
    label: str
    unit: str
    ours: float
    alternative: float | None = None
    more_is_better: bool = False
    at_most: float | None = None
    """Asked of ours, in `unit`."""
    at_least: float | None = None
    """Asked of ours, in `unit`."""
    ratio_at_least: float | None = None
    """Asked of the ratio."""
    ratios: tuple[float, ...] = ()
    """How many times better ours was in each round of taking turns: what the machine does meanwhile to one, it does
    to both."""

    @property
    def ratio(self) -> float | None:
        """How many times better ours is, the median where there were rounds; None without an alternative, or where it
        would be infinite."""
        if self.ratios:
            return median(self.ratios)
        if self.alternative is None:
            return None
        better, worse = (self.ours, self.alternative) if self.more_is_better else (self.alternative, self.ours)
        return better / worse if worse else None

    @property
    def asked(self) -> str:
        """What was asked, in words; empty where nothing was."""
        if self.at_most is not None:
            return f"≤ {plain_number(self.at_most)} {self.unit}"
        if self.at_least is not None:
            return f"≥ {plain_number(self.at_least)} {self.unit}"
        return "" if self.ratio_at_least is None else f"ratio ≥ {plain_number(self.ratio_at_least)}"

    @property
    def held(self) -> bool | None:
        """Whether it is what was asked; None where nothing was."""
        if self.at_most is not None:
            return self.ours <= self.at_most
        if self.at_least is not None:
            return self.ours >= self.at_least
        if self.ratio_at_least is not None:
            return self.ratio is not None and self.ratio >= self.ratio_at_least
        return None

    def to_json(self, *, judged: bool) -> dict[str, Any]:
        return {
            "label": self.label,
            "unit": self.unit,
            "ours": self.ours,
            "alternative": self.alternative,
            "ratio": self.ratio,
            "asked": self.asked or None,
            "held": self.held if judged else None,
        } | ({"ratios": list(self.ratios)} if self.ratios else {})


def plain_number(value: float) -> str:
    """Three digits or more, without an exponent."""
    size = abs(value)
    decimals = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2 if size >= 0.1 else 4
    return f"{value:,.{decimals}f}"
