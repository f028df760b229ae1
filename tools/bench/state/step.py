"""How long a real training step waits for its state: rows in memory, windowed rows, and separate tensors."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from ....pipeline.order import Order
from ....state_store import StateStore
from ..figure import Figure
from ..measured import Measured
from ..progress import counted
from .alternatives import SeparateTensors
from .epochs import expected_windows, pass_epoch
from .measured import StepSeconds, store_share
from .sizes import ROW_BYTES, ROW_FIELDS, StepSizes
from .training import TrainingLoop

_WARM_UP = 5


def measure(sizes: StepSizes, directory: Path) -> Measured:
    """Take some steps of each in turn, over and over."""
    order = Order.for_memory(sizes.budget_bytes // ROW_BYTES, sizes.samples, sizes.batch)
    made_for: dict[str, Any] = {"block_rows": order.block_rows, "dataset_fingerprint": "bench"}
    with (
        StateStore.create(directory / "resident", sizes.samples, ROW_FIELDS, **made_for) as resident,
        StateStore.create(
            directory / "windowed", sizes.samples, ROW_FIELDS, **made_for, memory_budget=sizes.budget_bytes
        ) as windowed,
    ):
        windowed.expect(expected_windows(order))
        # Blocks that were never written need not be read; from the second epoch on all are.
        pass_epoch("step: first epoch", windowed, order, epoch=0)
        loops = {
            "resident": TrainingLoop(resident, order),
            "windowed": TrainingLoop(windowed, order, steps_done=order.steps_per_epoch),
            "tensors": TrainingLoop(SeparateTensors(sizes.samples, {**ROW_FIELDS, "visits": 0.0}), order),
        }
        took: dict[str, list[StepSeconds]] = {name: [] for name in loops}
        for _ in counted("step: rounds", sizes.rounds):
            for name, loop in loops.items():
                took[name] += [loop.step() for _ in range(_WARM_UP + sizes.steps)][_WARM_UP:]
    share = {name: store_share(steps) for name, steps in took.items()}
    whole = {name: median(step.whole for step in steps) * 1e3 for name, steps in took.items()}
    return Measured(
        f"share of a training step that waits for the state; {sizes.rounds * sizes.steps} steps each, conv encoder, "
        f"batch {sizes.batch}, {sizes.samples:,} rows of 32 B, windowed in {sizes.budget_mb:g} MB",
        "7 float32 tensors, indexed and assigned within the step",
        (
            Figure("resident_wait_percent", "waiting, rows resident", "%", share["resident"], share["tensors"],
                   at_most=1),
            Figure("windowed_wait_percent", "waiting, rows windowed", "%", share["windowed"], share["tensors"],
                   at_most=1),
            Figure("resident_step_ms", "whole step, rows resident", "ms", whole["resident"], whole["tensors"]),
            Figure("windowed_step_ms", "whole step, rows windowed", "ms", whole["windowed"], whole["tensors"]),
        ),
    )  # fmt: skip
