"""How far the averaged gradient of a small batch is from the gradient of all samples: docs/bias.md and docs/bias.png.

The gradient is that of a linear encoder, averaged over batches with the samples' rows of state as they stand, against
that of the same loss on all samples at once. Features are clusters; temperatures stay at 0.1. Two data sets, of equal
clusters and of a long tail, three seeds each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import click
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.nn.functional import normalize

from thermopile.trainer.objectives import Objective, Progress, create_objective
from thermopile.trainer.objectives.sogclr import SogclrSettings

from .markdown import table
from .own_gamma import OfSogclr
from .reproduction.figures import figure

DOCS = Path(__file__).parent.parent / "docs"
SAMPLES, WIDTH, CLUSTERS, TAU = 512, 32, 32, 0.1
BATCHES, STALE, SMALL, SEEDS = (16, 32, 64, 128, 256), (32, 128, 512), 16, range(3)
ANGLE = 0.001
"""By which moving features turn at each step: 2° in an epoch of 32 steps, 29° in one of 512."""
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999", "#000000", "#8b6d00", "#7b3294")


class Method(NamedTuple):
    """An objective with its settings, and those with which it is the loss of all samples."""

    name: str
    mode: str
    settings: dict[str, Any]
    whole: dict[str, Any] = {}  # noqa: RUF012


NOW = {"gamma": 1.0, "gamma_schedule": "constant"}
FASTCLIP = {"tau": TAU, "gamma_schedule": "constant", "gamma": 0.2}
METHODS = {
    "CLIP": Method("clip", "bimodal", {"log_logit_scale": -math.log(TAU)}),
    "SimCLR": Method("simclr", "unimodal", {"tau": TAU}),
    "DCL": Method("dcl", "unimodal", {"tau": TAU}),
    "SogCLR": Method("sogclr", "bimodal", {"tau": TAU, "gamma": 0.8}, NOW),
    "iSogCLR": Method("isogclr", "bimodal", {"tau_init": TAU, "eta": 0.0, "gamma": 0.8}, NOW),
    "FastCLIP-v1": Method("fastclip_v1", "bimodal", FASTCLIP, NOW),
    "FastCLIP-v3": Method("fastclip_v3", "bimodal", FASTCLIP, NOW),
    "DeCL": Method("decl", "bimodal", {"tau": TAU, "auxiliary": "mean", "gamma": 0.2}, {"gamma": 1.0}),
    "AUC-CL": Method("auc_cl", "unimodal", {"negatives": "weighted"}),
}
EQUAL, KEPT = ("iSogCLR", "FastCLIP-v3"), ("SogCLR", "FastCLIP-v1", "DeCL")
"""Methods that at a constant temperature have SogCLR's and FastCLIP-v1's gradient; methods whose rows go stale."""
ALPHAS = (0.1, 1.0)
"""SogCLR with a gamma for each sample (SCENT)."""


class Data(NamedTuple):
    """Raw inputs [2, n, WIDTH] of both views, and those toward which they turn as features move."""

    start: Tensor
    end: Tensor

    def at(self, step: int) -> Tensor:
        return self.start * math.cos(ANGLE * step) + self.end * math.sin(ANGLE * step)


def make_data(samples: int, seed: int, *, long_tail: bool) -> Data:
    """Clusters of equal size, or from 1 to 1/100 of the largest; pairs are more alike than their cluster."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, WIDTH, generator=generator)

    shares = torch.logspace(0, -2 if long_tail else 0, CLUSTERS)
    cluster = torch.multinomial(shares, samples, replacement=True, generator=generator)
    parts = [noise(CLUSTERS)[cluster] + 0.6 * noise(samples) + 0.4 * noise(2, samples) for _ in range(2)]
    return Data(*parts)


def permuted(samples: int, batch: int, steps: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while steps > 0:
        for ids in torch.split(torch.randperm(samples, generator=generator), batch)[:steps]:
            yield ids
            steps -= 1


class Cell(NamedTuple):
    """A method, and the data on which its error is measured."""

    name: str
    batch: int = SMALL
    samples: int = SAMPLES
    moving: bool = False
    tail: bool = False
    alpha: float = 0.0
    """Above 0: a gamma of each sample's own."""


def error(cell: Cell, seed: int) -> float:
    """Return |mean gradient - full gradient| / |full gradient|, of a linear encoder at the identity."""
    _, batch, samples, moving, tail, alpha = cell
    torch.set_num_threads(1)
    method, data, epoch = METHODS[cell.name], make_data(samples, seed, long_tail=tail), samples // batch
    objective = create_objective(method.name, method.mode, **method.settings)
    if alpha:
        objective = OfSogclr("bimodal", SogclrSettings(tau=TAU, gamma=0.2))
        objective.alpha = alpha
    state = {name: torch.full((samples,), value) for name, value in objective.fields.items()}
    state |= {"visits": torch.zeros(samples)} if state else {}
    settling = epoch * (12 if samples == SAMPLES else 3) if state else 0
    with torch.no_grad():
        for number, ids in enumerate(permuted(samples, batch, settling, seed)):
            inputs = data.at(number if moving else 0)[:, ids]
            new = run(objective, inputs, {name: values[ids] for name, values in state.items()}).state
            for name, values in new.items():
                state[name][ids] = values
    inputs, mean = data.at(settling if moving else 0), torch.zeros(WIDTH, WIDTH)
    steps = max(epoch, 640)
    for ids in permuted(samples, batch, steps, seed + 1):
        mean += gradient(objective, inputs[:, ids], {name: values[ids] for name, values in state.items()}) / steps
    whole = create_objective(method.name, method.mode, **method.settings | method.whole)
    full = gradient(whole, inputs, state)
    return float((mean - full).norm() / full.norm())


def run(objective: Objective, inputs: Tensor, state: dict[str, Tensor], encoder: Tensor | None = None) -> Any:
    features = normalize(inputs if encoder is None else inputs @ encoder, dim=2)
    return objective(features[0], features[1], state, Progress(0, 1))


def gradient(objective: Objective, inputs: Tensor, state: dict[str, Tensor]) -> Tensor:
    encoder = torch.eye(WIDTH, requires_grad=True)
    (found,) = torch.autograd.grad(run(objective, inputs, state, encoder).loss, encoder)
    return found


def toy(variance: float, runs: int, steps: int, *, decl: bool, zero: bool) -> tuple[Tensor, Tensor]:
    """DeCL's example (its figures 1 and 3): ascend log F = s1 - log(e^s1 + e^s2 + noise).

    Returns F after each step, [steps, runs], and the last s1 and s2, [2, runs]. zero: start at 0 with the regulariser
    0.1 (s1² + s2²), as in figure 3; else from random points and without.
    """
    generator, gamma, rate = torch.Generator().manual_seed(0), 0.1, 0.2
    s = torch.zeros(2, runs) if zero else torch.randn(2, runs, generator=generator)
    average, values = s.exp().sum(0), []
    for _ in range(steps):
        noisy = s.exp().sum(0) + variance**0.5 * torch.randn(runs, generator=generator)
        average = (1 - gamma) * average + gamma * noisy
        drawn = torch.empty(runs).exponential_(generator=generator)
        slope = -s.exp() * (drawn / average.clamp(min=1e-3) if decl else 1 / noisy)
        slope[0] += 1
        s = s + rate * (slope - (0.2 * s if zero else 0))
        values.append(s[0].exp() / s.exp().sum(0))
    return torch.stack(values), s


def shown(values: list[float]) -> str:
    return f"{fmean(values):.3f} ± {stdev(values):.3f}"


@click.command(help=__doc__)
def main() -> None:
    began = time.monotonic()
    fixed = {name: [Cell(name, batch) for batch in BATCHES] for name in METHODS if name not in EQUAL}
    moving = {name: [Cell(name, SMALL, steps * SMALL, moving=True) for steps in STALE] for name in KEPT}
    own = {
        f"{'long tail' if tail else 'equal clusters'}, {'moving' if moves else 'fixed'}": [
            Cell(name, moving=moves, tail=tail, alpha=alpha)
            for name, alpha in (("SogCLR", 0.0), ("FastCLIP-v1", 0.0), *(("SogCLR", alpha) for alpha in ALPHAS))
        ]
        for tail in (False, True) for moves in (False, True)
    }  # fmt: skip
    every = {cell for rows in (fixed, moving, own) for cells in rows.values() for cell in cells}
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs = {cell: [pool.submit(error, cell, seed) for seed in SEEDS]
                for cell in sorted(every, key=lambda cell: -cell.samples)}  # fmt: skip
        found = {cell: [job.result() for job in of_seeds] for cell, of_seeds in jobs.items()}

    def rows_of(cells: dict[str, list[Cell]]) -> list[tuple[str, ...]]:
        return [(name, *(shown(found[cell]) for cell in of)) for name, of in cells.items()]

    toys = {
        (number, name): toy(variance, runs, 500, decl=name == "DeCL", zero=number == 3)
        for number, variance, runs in ((1, 0.2, 10), (3, 0.09, 100)) for name in ("direct", "DeCL")
    }  # fmt: skip
    minutes = (time.monotonic() - began) / 60
    words = [
        ("fixed", table(("b", *map(str, BATCHES)), rows_of(fixed))),
        ("moving", table(("n / b", *map(str, STALE)), rows_of(moving))),
        ("own", table(("data", "gamma 0.8", "gamma 0.2", *(f"own, alpha {alpha}" for alpha in ALPHAS)), rows_of(own))),
        ("toy", table(
            ("figure", "method", "F at the end, mean ± deviation over runs", "s1", "s2"),
            [(str(number), name, shown(values[-1].tolist()), shown(s[0].tolist()), shown(s[1].tolist()))
             for (number, name), (values, s) in toys.items()],
        )),
        ("minutes", f"{minutes:.0f} minutes on two cores."),
    ]  # fmt: skip
    page = DOCS / "bias.md"
    text = page.read_text("utf-8")
    for name, content in words:
        head, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{head}<!-- {name} -->\n{content}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    page.write_text(text, "utf-8")

    def curves(cells: dict[str, list[Cell]], places: tuple[int, ...], label: str) -> Any:
        def panel(axes: Axes) -> bool:
            for name, colour in zip(METHODS, COLOURS, strict=False):
                if of := cells.get(name):
                    axes.plot(places, [fmean(found[cell]) for cell in of], marker="o", color=colour, label=name)
            axes.set_xscale("log", base=2)
            axes.set(xlabel=label, ylabel="error of the averaged gradient", ylim=(0, None))
            return True

        return panel

    def of_toy(axes: Axes) -> bool:
        for name, colour in (("direct", COLOURS[3]), ("DeCL", COLOURS[0])):
            axes.plot(toys[3, name][0].mean(1), color=colour, label=f"{name}, DeCL's figure 3")
        axes.set(xlabel="step", ylabel="F")
        return True

    png = figure((13, 4), [curves(fixed, BATCHES, "batch size, features fixed"),
                           curves(moving, STALE, "steps between visits, features moving"), of_toy])  # fmt: skip
    assert png is not None
    (DOCS / "bias.png").write_bytes(png)


if __name__ == "__main__":
    main()
