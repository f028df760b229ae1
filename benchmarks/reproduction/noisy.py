"""SimCLR and DeCL with Gaussian noise on their similarities (DeCL, section 4.1 and Figure 2)."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from thermopile.trainer.objectives.decl import Decl, DeclSettings
from thermopile.trainer.objectives.ntxent import Simclr, SimclrSettings
from thermopile.trainer.objectives.pairs import Block, Pairs


class NoisyPairs(Pairs):
    """The similarities of a batch, each with noise of its own, from torch's generator."""

    def __init__(self, *batch: Any, noise: float, **frame: Any) -> None:
        """noise: its standard deviation."""
        self.noise = noise
        super().__init__(*batch, **frame)

    @cached_property
    def positives(self) -> Tensor:
        found: Tensor = (self.features[0] * self.features[1]).sum(1)
        return found + self.noise * torch.randn_like(found)

    def fill(self, similarities: Tensor, rows: slice, block: Block) -> None:
        super().fill(similarities, rows, block)
        similarities.add_(torch.randn_like(similarities), alpha=self.noise)


class NoisySimclrSettings(SimclrSettings, frozen=True):
    """SimCLR's settings, and the noise."""

    noise: float = Field(default=0.2, ge=0)
    """Standard deviation of the noise of a similarity."""


class NoisyDeclSettings(DeclSettings, frozen=True):
    """DeCL's settings, and the noise."""

    noise: float = Field(default=0.2, ge=0)
    """Standard deviation of the noise of a similarity."""


class NoisySimclr(Simclr):
    """SimCLR of noisy similarities."""

    settings_of_mode: ClassVar = {"unimodal": NoisySimclrSettings}

    def __init__(self, mode: str, settings: NoisySimclrSettings) -> None:
        super().__init__(mode, settings)
        self.pairs_of = partial(NoisyPairs, noise=settings.noise)  # type: ignore[assignment]


class NoisyDecl(Decl):
    """DeCL of noisy similarities."""

    settings_of_mode: ClassVar = {"unimodal": NoisyDeclSettings}

    def __init__(self, mode: str, settings: NoisyDeclSettings) -> None:
        super().__init__(mode, settings)
        self.pairs_of = partial(NoisyPairs, noise=settings.noise)  # type: ignore[assignment]
