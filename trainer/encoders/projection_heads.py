"""Projection heads by name, from a backbone's features to the objective's space."""

from collections.abc import Callable

from torch import nn

VICREG_WIDTH = 8192


def linear(width: int, dim: int, hidden: int | None = None) -> nn.Module:
    """One linear layer; `hidden` is unused."""
    return nn.Linear(width, dim)


def simclr(width: int, dim: int, hidden: int | None = None) -> nn.Module:
    """Two layers; the hidden one has the backbone's width by default: W2 relu(W1 h).

    Source: SimCLR (Chen et al., ICML 2020), section 2.1. The authors' code adds a batch norm after each layer. The
    paper does not, and without it a sample's features are independent of its batch and of the number of ranks.
    """
    hidden = hidden or width
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, dim))


def vicreg(width: int, dim: int, hidden: int | None = None) -> nn.Module:
    """Three layers, the first two with 8192 units by default, batch norm and ReLU; `dim` = 8192 is the published one.

    Source: VICReg (Bardes et al., ICLR 2022), whose code has no bias in the last layer; iSogCLR (ICML 2023), section
    6.1, uses it with 8192 units in all three.
    """
    hidden = hidden or VICREG_WIDTH
    return nn.Sequential(
        nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, dim, bias=False),
    )  # fmt: skip


HEADS: dict[str, Callable[[int, int, int | None], nn.Module]] = {"linear": linear, "simclr": simclr, "vicreg": vicreg}
"""Name → (width of the features, dim, hidden units or None for the default) → a module [b, width] → [b, dim]."""
