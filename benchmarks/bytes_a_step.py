"""What ranks on several hosts send in a step: by formula, by the collectives that they call, and on the wire.

\b
counted  ranks on this machine, one for each host, in a network namespace whose counter says what went over the wire
medium   FastCLIP's figure 3 on paper: time of communication on its hosts, at 10 and 100 Gbit/s
large    the same
xlarge   the same, on two hosts

The alternative is OpenCLIP's local loss (exchanges.py). Both also sum the encoders' gradients, which DDP does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .exchanges import GRADIENTS, LOCAL_LOSS
from .harness import Figure, Measured, Part, counted, script

SCALARS = {"clip": 6, "fastclip_v3": 8, "isogclr": 12, "fastclip_v2": 15}
"""Numbers that a sample has besides its features: three sums of each of its two anchors, and its state."""
NAMESPACE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@dataclass(frozen=True)
class Sizes:
    """A step in float32 of ranks that share a batch."""

    hosts: str = "2+4"
    batch: int = 1024
    dim: int = 512
    weights: int = 1_000_000
    """The encoders'."""
    steps: int = 20


@dataclass(frozen=True)
class PaperSizes:
    """A setting of FastCLIP's table 2, with the encoders' size as OpenCLIP's docs/model_profile.csv has it."""

    rows: int
    """Samples that each GPU contributes to a batch."""
    dim: int
    million_weights: float
    hosts: str = "2+4+8"
    gpus: int = 4
    """GPUs of each host."""
    objective: str = "fastclip_v3"


def payload(method: str, ranks: int, batch: int, dim: int, weights: float) -> float:
    """Bytes that each rank sends in a step, and as many that it receives; numbers are float32.

    On hosts with several ranks, in a ring through all of them, a host sends as much as each rank.
    """
    of_others = (ranks - 1) / ranks
    if method == GRADIENTS:
        return of_others * 2 * 4 * weights
    a_sample = 4 * dim if method == LOCAL_LOSS else 2 * dim + SCALARS[method]
    return of_others * 4 * batch * a_sample


def count(sizes: Sizes, directory: Path) -> Measured:
    """Steps of every method on as many ranks as hosts."""
    methods, figures = [*SCALARS, LOCAL_LOSS, GRADIENTS], []
    hosts = [int(number) for number in sizes.hosts.split("+")]
    for done in counted("hosts", len(hosts)):
        ranks = hosts[done]
        found = _exchange(ranks, sizes, methods)
        formula = {method: payload(method, ranks, sizes.batch, sizes.dim, sizes.weights) for method in methods}
        for method in methods:
            name, label = f"{method}_{ranks}", f"{method}, {ranks} hosts"
            figures += [
                Figure(f"{name}_{what}", f"{label}: {words}", "kB", found[method][what] / 1e3, formula[method] / 1e3)
                for what, words in (("payload", "payload"), ("wire", "on the wire"))
            ]
        off = max(abs(found[method]["payload"] / formula[method] - 1) for method in methods)
        local, largest = found[LOCAL_LOSS]["payload"], max(found[method]["payload"] for method in SCALARS)
        allowed = local + 16 * 4 * sizes.batch * (ranks - 1) / ranks
        figures += [
            Figure(f"off_{ranks}", f"{ranks} hosts: largest difference from the formula", "%", 100 * off, at_most=2),
            Figure(f"largest_{ranks}", f"{ranks} hosts: largest payload of ours, beside the local loss's", "kB",
                   largest / 1e3, local / 1e3, at_most=allowed / 1e3),
        ]  # fmt: skip
    return Measured(
        f"sent by a rank in a step: batch {sizes.batch:,}, d = {sizes.dim}, {sizes.weights:,} weights, float32, gloo, "
        f"{sizes.steps} steps",
        "the formula",
        figures,
    )


def _exchange(ranks: int, sizes: Sizes, methods: list[str]) -> dict[str, dict[str, float]]:
    numbers = map(str, (ranks, sizes.batch, sizes.dim, sizes.weights, sizes.steps))
    quiet = ("-W", "ignore::FutureWarning")  # of the all_gather that OpenCLIP calls
    command = [*NAMESPACE, sys.executable, *quiet, "-m", "benchmarks.exchanges", *numbers, *methods]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def on_paper(sizes: PaperSizes, directory: Path) -> Measured:
    """Compute it; nothing is run."""
    figures = []
    for hosts in map(int, sizes.hosts.split("+")):
        ranks = hosts * sizes.gpus
        ours, local, gradients = (
            payload(method, ranks, ranks * sizes.rows, sizes.dim, sizes.million_weights * 1e6)
            for method in (sizes.objective, LOCAL_LOSS, GRADIENTS)
        )
        for gbit in (10, 100):
            ms_a_byte, name, label = 8e-6 / gbit, f"{hosts}_{gbit}", f"{hosts} hosts, {gbit} Gbit/s"
            figures += [
                Figure(f"{name}_loss_ms", f"{label}: the loss", "ms", ours * ms_a_byte, local * ms_a_byte),
                Figure(f"{name}_all_ms", f"{label}: and the gradients", "ms",
                       (ours + gradients) * ms_a_byte, (local + gradients) * ms_a_byte),
            ]  # fmt: skip
    return Measured(
        f"communication of {sizes.objective}, {sizes.gpus} GPUs a host, {sizes.rows} pairs a GPU, d = {sizes.dim}, "
        f"{sizes.million_weights:,} million weights, float32, in a ring of all GPUs",
        "OpenCLIP's local loss",
        figures,
    )


def _paper(rows: int, dim: int, million_weights: float, **others: Any) -> Part:
    sizes = PaperSizes(rows, dim, million_weights, **others)
    return Part(on_paper, sizes, sizes)


PARTS = {
    "counted": Part(count, Sizes(), Sizes(batch=64, dim=16, weights=1000, steps=2)),
    "medium": _paper(128, 1024, 102.01),  # RN50
    "large": _paper(256, 512, 151.28),  # ViT-B-32
    "xlarge": _paper(640, 512, 149.62, hosts="2"),  # ViT-B-16
}

if __name__ == "__main__":
    script(__doc__, PARTS, "torch")()
