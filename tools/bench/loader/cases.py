"""What is loaded, by whom, and how much faster ours has to be."""

from __future__ import annotations

from dataclasses import dataclass

FFCV, DALI, FFCV_OWN, PILLOW, DECODE = "ffcv", "dali", "ffcv_own", "pillow", "decode"
FFCV_UNVERIFIED, DALI_UNVERIFIED = "ffcv_unverified", "dali_unverified"

NAMES = {
    FFCV: "ffcv",
    DALI: "dali",
    FFCV_OWN: "FFCV's own Loader",
    PILLOW: "torch DataLoader + Pillow",
    DECODE: "libjpeg-turbo alone",
    FFCV_UNVERIFIED: "ffcv without checksums",
    DALI_UNVERIFIED: "dali without checksums",
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
    pairs: tuple[tuple[str, str], ...]
    """(ours, other) whose rates are compared."""


def _case(
    title: str, recipe: str, views: int, contenders: tuple[str, ...], asked: dict[tuple[str, str], float]
) -> Case:
    """Compare each of ours with each of the others."""
    ours = [name for name in (FFCV, DALI) if name in contenders]
    pairs = tuple((name, other) for name in ours for other in contenders if other not in ours)
    return Case(title, recipe, views, contenders, asked, pairs)


_CHECKSUM = {(FFCV, FFCV_UNVERIFIED): 0.98, (DALI, DALI_UNVERIFIED): 0.98}
_ALL = (FFCV, DALI, FFCV_OWN, PILLOW, DECODE)

CASES = {
    "single": _case(
        "one view, crop and flip", "crop_flip", 1, _ALL,
        {(FFCV, FFCV_OWN): 1.2, (FFCV, PILLOW): 2.5, (DALI, PILLOW): 1.2},
    ),
    "two_views": _case("two views, crop and flip", "crop_flip", 2, _ALL, {(FFCV, FFCV_OWN): 2.0}),
    # FFCV has no operation for hue, grayscale and blur.
    "simclr": _case(
        "two views, SimCLR's whole recipe", "simclr", 2, (FFCV, DALI, PILLOW, DECODE), {(FFCV, PILLOW): 3.0}
    ),
    "checksum": Case(
        "one view, crop and flip, with checksums and without", "crop_flip", 1,
        (FFCV, FFCV_UNVERIFIED, DALI, DALI_UNVERIFIED), _CHECKSUM, tuple(_CHECKSUM),
    ),
}  # fmt: skip
