"""What one part of a command has found out."""

from __future__ import annotations

from dataclasses import dataclass

from .figure import Figure


@dataclass(frozen=True)
class Measured:
    """What one part has found out."""

    title: str
    """What was done, with its sizes."""
    versus: str
    """What the alternative is."""
    figures: tuple[Figure, ...]
    seconds: float = 0.0
    """How long the part took."""
    peak_bytes: int = 0
    """Most memory that its process had (VmHWM)."""
    notes: tuple[str, ...] = ()
    """What the figures mean, or what they leave out: a line each, printed below them."""
