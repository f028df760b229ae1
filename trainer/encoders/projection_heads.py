"""Projection heads by name, from a backbone's features to the objective's space, and predictors after them."""

from collections.abc import Callable

from torch import nn

MOCO_V3_WIDTH = 4096


def simclr(width: int, dim: int, hidden: int | None = None) -> nn.Module:
    """Two layers; the hidden one has the backbone's width by default: W2 relu(W1 h).

    Source: SimCLR (Chen et al., ICML 2020), section 2.1. The authors' code adds a batch norm after each layer, like
    `simclr_bn`. The paper does not, and without it a sample's features do not depend on its batch and the ranks.
    """
    hidden = hidden or width
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, dim))


def simclr_bn(width: int, dim: int, hidden: int | None = None) -> nn.Module:
    """As `simclr`, with a batch norm after each layer; the last norm scales, but does not shift.

    Source: the code of SimCLR (Chen et al., ICML 2020).
    """
    hidden = hidden or width
    last = nn.BatchNorm1d(dim)
    last.bias.requires_grad_(False)  # it stays 0
    return nn.Sequential(*_normed(width, hidden), nn.ReLU(), nn.Linear(hidden, dim, bias=False), last)


def moco_v3(width: int, dim: int, hidden: int | None = None) -> nn.Module:
    """Three layers, by default with 4096 hidden units, each with batch norm; the last norm has no parameters.

    Source: MoCo v3 (Chen et al., ICCV 2021), section 4, for ViTs; `dim` = 256 there.
    """
    hidden = hidden or MOCO_V3_WIDTH
    first, second, last = _normed(width, hidden), _normed(hidden, hidden), _normed(hidden, dim, affine=False)
    return nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), *last)


def moco_v3_resnet(width: int, dim: int, hidden: int | None = None) -> nn.Module:
    """As `moco_v3` with two layers. Source: the code of MoCo v3 (Chen et al., ICCV 2021), for ResNets."""
    hidden = hidden or MOCO_V3_WIDTH
    return nn.Sequential(*_normed(width, hidden), nn.ReLU(), *_normed(hidden, dim, affine=False))


def vicreg(width: int, dim: int, hidden: int | None = None) -> nn.Module:
    """Three layers, the first two with 8192 units by default, batch norm and ReLU; `dim` is 8192 in the papers.

    Source: VICReg (Bardes et al., ICLR 2022), whose code has no bias in the last layer; iSogCLR (ICML 2023), section
    6.1, uses it with 8192 units in all three.
    """
    hidden = hidden or 8192
    first, second = (_normed(before, hidden, bias=True) for before in (width, hidden))
    return nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), nn.Linear(hidden, dim, bias=False))


def moco_v3_predictor(dim: int, hidden: int | None = None) -> nn.Module:
    """Two layers dim → 4096 units by default → dim, as the head's last two. Source: as `moco_v3`."""
    return moco_v3_resnet(dim, dim, hidden)


def moco_v3_resnet_predictor(dim: int, hidden: int | None = None) -> nn.Module:
    """As `moco_v3_predictor`, without the last batch norm. Source: as `moco_v3_resnet`."""
    hidden = hidden or MOCO_V3_WIDTH
    return nn.Sequential(*_normed(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim, bias=False))


def _normed(width: int, outputs: int, *, bias: bool = False, affine: bool = True) -> tuple[nn.Module, nn.Module]:
    """Return a linear layer, whose bias the norm would remove, and its batch norm."""
    return nn.Linear(width, outputs, bias=bias), nn.BatchNorm1d(outputs, affine=affine)


HEADS: dict[str, Callable[[int, int, int | None], nn.Module]] = {
    "linear": lambda width, dim, hidden: nn.Linear(width, dim),
    "none": lambda width, dim, hidden: nn.Identity(),  # for encoders whose features have `dim` dimensions already
    "simclr": simclr,
    "simclr_bn": simclr_bn,
    "moco_v3": moco_v3,
    "moco_v3_resnet": moco_v3_resnet,
    "vicreg": vicreg,
}
"""Name → (width of the features, dim, hidden units or None for the default) → a module [b, width] → [b, dim]."""

PREDICTORS: dict[str, Callable[[int, int | None], nn.Module]] = {
    "moco_v3": moco_v3_predictor,
    "moco_v3_resnet": moco_v3_resnet_predictor,
}
"""Name → (dim, hidden units or None for the default) → a module [b, dim] → [b, dim]."""
