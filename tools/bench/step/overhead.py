"""How much longer the trainer's step takes than its computation alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from ....trainer.step_report import split
from ..figure import Figure
from ..measured import Measured
from ..progress import counted
from ..rounds import ratios
from .bare import BareLoop
from .sizes import OverheadSizes
from .training import BatchesInMemory, open_trainer, run

_NO_CHECKPOINT = {"checkpoint": {"every_steps": 0, "every_minutes": 0}}


def measure(sizes: OverheadSizes, directory: Path) -> Measured:
    """Turns of some steps on the same batches, first the trainer's, then the bare loop's."""
    with open_trainer(sizes, directory, _NO_CHECKPOINT) as trainer:
        order = trainer.order
        bare = BareLoop(trainer.config, trainer.dataset, order.steps_per_epoch, trainer.total_steps)
        rounds, bare_turns = counted("overhead: rounds", 1 + sizes.rounds), []

        def bare_turn(done: int, batches: BatchesInMemory) -> None:
            if done % sizes.turn_steps == 0:
                next(rounds)
                steps = range(done - sizes.turn_steps, done)
                bare_turns.append(bare.seconds([batches.batch(step) for step in steps]))

        seconds = run(trainer, sizes.steps, bare_turn)
        next(rounds, None)
        metrics = trainer.run_directory.metrics_file.read_text().splitlines()
    turns = [sum(seconds[first : first + sizes.turn_steps]) for first in range(0, sizes.steps, sizes.turn_steps)]
    return Measured(
        f"{sizes.rounds} turns of {sizes.turn_steps} steps of either, after one to warm up; isogclr on pairs, conv "
        f"encoder, pictures of 32 pixels, batch {sizes.batch}, {sizes.samples:,} samples, batches in memory, "
        f"{torch.get_num_threads()} threads of torch",
        "a bare loop of the same encoders, objective and optimiser: no store, log or clocks",
        _figures(turns[1:], bare_turns[1:], sizes.turn_steps) + _shares(metrics, sizes),
    )


def _figures(turns: Sequence[float], bare: Sequence[float], turn_steps: int) -> tuple[Figure, ...]:
    ms, bare_ms = (1e3 * median(seconds) / turn_steps for seconds in (turns, bare))
    return (
        Figure("step_ms", "step", "ms", ms, bare_ms, ratios=ratios(bare, turns)),
        Figure("overhead_percent", "beyond computation", "%", 100 * (median(ratios(turns, bare)) - 1), at_most=3),
    )


def _shares(metrics: Sequence[str], sizes: OverheadSizes) -> tuple[Figure, ...]:
    """Where the trainer itself says that its steps' time went."""
    lines = [json.loads(line) for line in metrics[sizes.turn_steps : sizes.steps]]
    # The first step of a turn counts the other's turn as waiting for data.
    shares = split([line for line in lines if (line["step"] - 1) % sizes.turn_steps])
    return tuple(Figure(f"{name}_percent", name.replace("_", " "), "%", 100 * share) for name, share in shares.items())
