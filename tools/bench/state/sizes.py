"""How much each part measures: at full scale, for which figures are asked, and at a small one that takes seconds."""

from __future__ import annotations

from dataclasses import dataclass

from ....state_store.schema import Schema

ROW_FIELDS = {"image/log_s": float("-inf"), "image/tau": 0.05, "image/u": 0.0,
              "text/log_s": float("-inf"), "text/tau": 0.05, "text/u": 0.0}  # fmt: skip
"""State of an image-text pair."""
ROW_BYTES = Schema(ROW_FIELDS).row_words * 4
"""With visits and last_step: 32."""


@dataclass(frozen=True)
class RowsSizes:
    """Random batches of rows of 8 fields; with visits and last_step, a row is 64 B."""

    samples: int = 10**8
    batch: int = 4096
    batches: int = 400

    @property
    def fields(self) -> dict[str, float]:
        return {f"field_{number}": 0.01 for number in range(8)}

    @property
    def memory_bytes(self) -> int:
        return self.samples * (Schema(self.fields).row_words * 4 + len(self.fields) * 4)

    @property
    def disk_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class StepSizes:
    """Training steps with all rows resident, with windowed rows, and with separate tensors, turn by turn."""

    samples: int = 2 * 10**6
    budget_mb: float = 5.0
    batch: int = 256
    steps: int = 60
    rounds: int = 4

    @property
    def budget_bytes(self) -> int:
        return int(self.budget_mb * 1e6)

    @property
    def memory_bytes(self) -> int:
        return 2 * self.samples * ROW_BYTES

    @property
    def disk_bytes(self) -> int:
        return self.samples * ROW_BYTES


@dataclass(frozen=True)
class WindowedSizes:
    """Two epochs through a window, the first as fast as it goes, the second with a step of `step_ms`."""

    samples: int = 2 * 10**8
    budget_mb: float = 512.0
    batch: int = 16_384
    step_ms: float = 50.0

    @property
    def budget_bytes(self) -> int:
        return int(self.budget_mb * 1e6)

    @property
    def memory_bytes(self) -> int:
        return self.budget_bytes

    @property
    def disk_bytes(self) -> int:
        return self.samples * ROW_BYTES


@dataclass(frozen=True)
class SnapshotSizes:
    """Snapshots of rows that have all changed, alone and while training goes on."""

    samples: int = 10**7
    batch: int = 256
    quiet_steps: int = 20
    repeats: int = 5

    @property
    def memory_bytes(self) -> int:
        return 4 * self.samples * ROW_BYTES  # the rows, the columns that plain zarr writes, and what is on its way

    @property
    def disk_bytes(self) -> int:
        return 4 * self.samples * ROW_BYTES


@dataclass(frozen=True)
class RetentionSizes:
    """Snapshots of rows that have all changed, all but the newest few deleted after each."""

    samples: int = 2 * 10**6
    snapshots: int = 50
    keep_last: int = 3

    @property
    def memory_bytes(self) -> int:
        return 3 * self.samples * ROW_BYTES

    @property
    def disk_bytes(self) -> int:
        return 6 * self.samples * ROW_BYTES


Sizes = RowsSizes | StepSizes | WindowedSizes | SnapshotSizes | RetentionSizes

FULL: dict[str, Sizes] = {
    "rows": RowsSizes(),
    "step": StepSizes(),
    "windowed": WindowedSizes(),
    "snapshot": SnapshotSizes(),
    "retention": RetentionSizes(),
}

SMALL: dict[str, Sizes] = {
    "rows": RowsSizes(samples=10**5, batch=512, batches=10),
    "step": StepSizes(samples=8_000, budget_mb=0.16, batch=64, steps=2, rounds=1),
    "windowed": WindowedSizes(samples=8_000, budget_mb=0.16, batch=64, step_ms=1.0),
    "snapshot": SnapshotSizes(samples=20_000, batch=64, quiet_steps=2, repeats=1),
    "retention": RetentionSizes(samples=20_000, snapshots=5, keep_last=2),
}
