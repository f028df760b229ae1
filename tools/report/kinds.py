"""The figures on the cards of the kinds of samples."""

from __future__ import annotations

from ..inspection.confirmation import Confirmation
from ..inspection.samples import Sample
from .sheets import by_side, state_word

_VISITS, _LOG_S, _TAU = ("visits", "{:,}"), ("log_s", "{:+.2f}"), ("tau", "{:.4f}")
_FIGURES = {"too_few_visits": (_VISITS,), "stuck": (_LOG_S,), "misfit": (_LOG_S,), "crowded": (_TAU,),
            "rare": (_TAU,), "ordinary": (_TAU, _LOG_S, _VISITS)}  # fmt: skip
"""Kind -> field of the state and format of the figure on a card; the first that the state has."""


def figure(kind: str, sample: Sample) -> str:
    """Return the figure that a sample of this kind is known by, per side."""
    shown = ((state_word(field), by_side(sample, field, form)) for field, form in _FIGURES[kind])
    return next((f"{word} {figures}" for word, figures in shown if figures), "")


def margins(confirmation: Confirmation | None) -> dict[int, str]:
    """Return what a forward pass adds to the figures of samples, by id."""
    if confirmation is None:
        return {}
    pairs = zip(confirmation.sample_ids.tolist(), confirmation.margin.tolist(), strict=True)
    return {id: f", margin {margin:+.3f}" for id, margin in pairs}
