"""How much each part measures: at full scale, for which figures are asked, and at a small one that takes seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class _Training:
    """iSogCLR on the glyphs of the embedded example, pictures of 32 pixels, on the CPU."""

    samples: int = 10_000
    batch: int = 256
    image: str = "conv"
    """The image encoder; texts have `mean_embedding`."""

    @property
    def memory_bytes(self) -> int:
        return self.samples * 3 * 32**2 * 4

    @property
    def disk_bytes(self) -> int:
        return self.samples * 10_000


@dataclass(frozen=True, kw_only=True)
class OverheadSizes(_Training):
    """Turns of the bare loop and the trainer, some steps each."""

    turn_steps: int = 10
    rounds: int = 100

    @property
    def steps(self) -> int:
        """Of either, with those that warm up."""
        return (1 + self.rounds) * self.turn_steps


@dataclass(frozen=True, kw_only=True)
class CheckpointSizes(_Training):
    """Checkpoints, each with steps before it that nothing disturbs and steps after it while it is written."""

    checkpoints: int = 20
    quiet_steps: int = 10
    during_steps: int = 20
    warm_up_steps: int = 3
    model_bytes: int = 3 * 10**7
    """Of the weights and AdamW's means, rounded up."""

    @property
    def every_steps(self) -> int:
        """From one checkpoint to the next."""
        return self.during_steps + self.warm_up_steps + self.quiet_steps + 1

    @property
    def steps(self) -> int:
        """The first checkpoint warms up, and what follows the last one is part of it."""
        return (1 + self.checkpoints) * self.every_steps + self.during_steps

    @property
    def memory_bytes(self) -> int:
        return 6 * self.model_bytes + super().memory_bytes

    @property
    def disk_bytes(self) -> int:
        return 5 * self.model_bytes + super().disk_bytes


Sizes = OverheadSizes | CheckpointSizes

FULL: dict[str, Sizes] = {
    "overhead": OverheadSizes(),
    "checkpoint": CheckpointSizes(),
    "large_checkpoint": CheckpointSizes(
        image="hf:resnet-50", batch=32, checkpoints=10, quiet_steps=5, during_steps=10, model_bytes=3 * 10**8
    ),
}

_FEW_CHECKPOINTS = CheckpointSizes(samples=128, batch=32, checkpoints=2, quiet_steps=2, during_steps=2, warm_up_steps=1)

SMALL: dict[str, Sizes] = {
    "overhead": OverheadSizes(samples=128, batch=32, turn_steps=2, rounds=2),
    "checkpoint": _FEW_CHECKPOINTS,
    "large_checkpoint": replace(_FEW_CHECKPOINTS, image="hf:resnet-18", model_bytes=15 * 10**7),
}
