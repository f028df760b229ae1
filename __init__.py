"""thermopile: contrastive pretraining in which every sample has its own temperature."""

from ._version import __version__

__all__ = ["__version__"]
