"""What is loaded, by whom, and how much faster ours has to be."""

from __future__ import annotations

from dataclasses import dataclass

FFCV, DALI, FFCV_OWN, PILLOW, DECODE = "ffcv", "dali", "ffcv_own", "pillow", "decode"
UNVERIFIED = "unverified"

NAMES = {
    FFCV: "ffcv",
    DALI: "dali",
    FFCV_OWN: "FFCV's own Loader",
    PILLOW: "torch DataLoader + Pillow",
    DECODE: "libjpeg-turbo alone",
    UNVERIFIED: "ffcv, nothing compared with its checksum",
}
"""Contender -> what it is called in tables."""

AHEAD = 2
"""Batches that a contender makes before they are asked for; of DataLoader, batches of each process."""


@dataclass(frozen=True)
class Case:
    """Views of a recipe."""

    title: str
    recipe: str
    views: int
    contenders: tuple[str, ...]
    """In the order of their turns."""
    asked: dict[tuple[str, str], float]
    """(ours, other) -> how many times faster ours has to be."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each of ours with each of the others."""
        ours = [name for name in (FFCV, DALI) if name in self.contenders]
        return [(name, other) for name in ours for other in self.contenders if other not in ours]


_ALL = (FFCV, DALI, FFCV_OWN, PILLOW, DECODE)

CASES = {
    "single": Case(
        "one view, crop and flip", "crop_flip", 1, _ALL,
        {(FFCV, FFCV_OWN): 1.2, (FFCV, PILLOW): 2.5, (DALI, PILLOW): 1.2},
    ),
    "two_views": Case("two views, crop and flip", "crop_flip", 2, _ALL, {(FFCV, FFCV_OWN): 2.0}),
    # FFCV has no operation for hue, grayscale and blur.
    "simclr": Case(
        "two views, SimCLR's whole recipe", "simclr", 2, (FFCV, DALI, PILLOW, DECODE), {(FFCV, PILLOW): 3.0}
    ),
    "checksum": Case(
        "one view, crop and flip, with checksums and without", "crop_flip", 1, (FFCV, UNVERIFIED),
        {(FFCV, UNVERIFIED): 0.98},
    ),
}  # fmt: skip
