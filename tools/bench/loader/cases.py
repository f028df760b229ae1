"""What is loaded, by whom, and how much faster ours has to be."""

from __future__ import annotations

from dataclasses import dataclass

FFCV, DALI, FFCV_OWN, PILLOW, DECODE = "ffcv", "dali", "ffcv_own", "pillow", "decode"

NAMES = {
    FFCV: "ffcv",
    DALI: "dali",
    FFCV_OWN: "FFCV's own Loader",
    PILLOW: "torch DataLoader + Pillow",
    DECODE: "libjpeg-turbo alone",
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
        others = [name for name in self.contenders if name not in (FFCV, DALI)]
        return [(name, other) for name in (FFCV, DALI) for other in others]


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
}  # fmt: skip
