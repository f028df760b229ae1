"""Whether batches of near samples train better than drawn ones, by R@1 on icons: decided before it is built.

A sample's state could hold a sketch of its last features for nothing, and the order could put near samples into the
same batch. Tried here with an order from outside and a loop of its own: from the third epoch on, the samples of each of
16 canonical shards are halved by random directions of the features of their last visits, pictures' and captions'
together, down to leaves of 16; a batch of 256 is one leaf of each shard. Encoders, data, steps and the rest are those
of the other order. `sketch` does it with a random projection of the features to 32 numbers; `one tree` with all samples
in one shard, as no order of ours could.

The icons are grey, of 32 pixels, of the first 90 sets by name; 2,000 are tested. Runs are kept in the lines beside this
module; a later call makes what is missing. FOLDER/icons.parquet is that of benchmarks.icons.

\b
Examples:
  PYTHONPATH=build/resvg python -m benchmarks.neighbours FOLDER
  PYTHONPATH=build/resvg python -m benchmarks.neighbours FOLDER --seeds 1 --only clip
"""

from __future__ import annotations

import json
import math
import re
import time
from io import BytesIO
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import click
import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize

from thermopile.trainer.objectives import Progress, create_objective

from . import icons
from .markdown import table
from .reproduction.running import commit

LINES = Path(__file__).with_suffix(".jsonl")
SETS, SIDE, TESTED = 90, 32, 2_000
BATCH, SHARDS, EPOCHS, DIM, SKETCH = 256, 16, 8, 64, 32
LEAF = BATCH // SHARDS
FIRST = 2
"""Epoch, from 0, of the first batches of near samples: all features are known then, and are no longer random."""
ORDERS = ("uniform", "neighbours", "sketch", "one tree")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "clip": {}, "sogclr": {"tau": 0.05}, "isogclr": {"tau_init": 0.05, "rho": 1.0},
}  # fmt: skip
Ids = NDArray[np.int64]


class Icons(NamedTuple):
    """Grey pixels uint8 [n, 1, 32, 32], a caption's words int64 [n, 8] with 0 beyond its end, and test ids first."""

    pixels: Tensor
    words: Tensor


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seeds", default=5, show_default=True)
@click.option(
    "--only", "objectives", multiple=True, type=click.Choice([*OBJECTIVES]), default=("clip",), show_default=True
)
def main(folder: Path, seeds: int, objectives: tuple[str, ...]) -> None:
    found = {line["run"]: line for line in map(json.loads, LINES.read_text().splitlines())} if LINES.exists() else {}
    data = read_icons(folder)
    for seed in range(seeds):
        for objective in objectives:
            for order in ORDERS:
                if (run := f"icons-{objective}-{order}-{seed}") not in found:
                    began = time.monotonic()
                    line = {"run": run, "commit": commit(), **trained(data, objective, order, seed)}
                    found[run] = line | {"seconds": round(time.monotonic() - began)}
                    with LINES.open("a") as file:
                        file.write(json.dumps(found[run]) + "\n")
    click.echo(said(found))


def read_icons(folder: Path) -> Icons:
    """Read the icons, or what an earlier call kept of them."""
    kept = folder / f"grey-{SETS}.npz"
    if not kept.exists():
        rows = pq.read_table(icons.make(folder)).to_pydict()
        chosen = set(sorted(set(rows["set"]))[:SETS])
        places = [place for place, name in enumerate(rows["set"]) if name in chosen]
        places = np.random.default_rng(0).permutation(places).tolist()  # the first ones are tested
        pictures = (Image.open(BytesIO(rows["image"][place])).convert("L").resize((SIDE, SIDE)) for place in places)
        pixels = np.stack([np.asarray(picture) for picture in pictures])
        texts = [re.findall(r"[a-z0-9]+", rows["caption"][place].lower())[:8] for place in places]
        numbers = {
            word: number for number, word in enumerate(sorted({word for text in texts for word in text}), start=1)
        }
        words = np.zeros((len(texts), 8), np.int64)
        for row, text in enumerate(texts):
            words[row, : len(text)] = [numbers[word] for word in text]
        np.savez(kept, pixels=pixels, words=words)
    with np.load(kept) as file:
        return Icons(torch.from_numpy(file["pixels"][:, None]), torch.from_numpy(file["words"]))


class Pair(nn.Module):
    """A small convolution, and the mean of the words' vectors."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside in ((1, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(inside, outside, 3, 2, 1), nn.GroupNorm(8, outside), nn.GELU()]
        self.image = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * (SIDE // 8) ** 2, DIM))
        self.text = nn.EmbeddingBag(vocabulary, DIM, padding_idx=0, mode="mean")

    def forward(self, pixels: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.image(1 - pixels.float() / 255), dim=1), normalize(self.text(words), dim=1)


def trained(data: Icons, objective: str, order: str, seed: int) -> dict[str, float]:
    """Train, and return R@1 of the test pairs in percent, both ways, and of batches the mean cosine of two pictures."""
    torch.manual_seed(seed)
    random, n = np.random.default_rng(seed), len(data.words) - TESTED
    steps = n // BATCH
    shards = random.permutation(n)[: n // SHARDS * SHARDS].reshape(1 if order == "one tree" else SHARDS, -1) + TESTED
    pair, loss_of = Pair(int(data.words.max()) + 1), create_objective(objective, **OBJECTIVES[objective])
    optimizer = torch.optim.AdamW([*pair.parameters(), *loss_of.parameters()], lr=1e-3, weight_decay=1e-4)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps * EPOCHS, pct_start=0.1)
    rows = {name: torch.full((len(data.words),), start) for name, start in loss_of.fields.items()}
    rows["visits"] = torch.zeros(len(data.words), dtype=torch.int32)
    last, nearness = np.zeros((len(data.words), 2 * DIM), np.float32), 0.0
    projection = random.standard_normal((2 * DIM, SKETCH), np.float32)
    for epoch in range(EPOCHS):
        known = last @ projection if order == "sketch" else last
        batches = batches_of(shards, None if order == "uniform" or epoch < FIRST else known, random)
        for step, ids in enumerate(map(torch.from_numpy, batches[:steps])):
            first, second = pair(data.pixels[ids], data.words[ids])
            state = {name: of[ids] for name, of in rows.items() if loss_of.fields}
            outcome = loss_of(first, second, state, Progress(epoch * steps + step, steps, EPOCHS))
            optimizer.zero_grad()
            outcome.loss.backward()
            optimizer.step()
            rate.step()
            for name, values in outcome.state.items():
                rows[name][ids] = values.to(rows[name].dtype)
            last[ids] = torch.cat([first, second], 1).detach().numpy()
        nearness = float(first.detach().sum(0).square().sum() - BATCH) / (BATCH * (BATCH - 1))
    return scores(pair, data) | {"nearness": nearness, "steps": steps * EPOCHS}


def batches_of(shards: Ids, features: NDArray[np.float32] | None, random: np.random.Generator) -> Ids:
    """Return the batches of an epoch, [steps, BATCH]: of every shard as many leaves, or as many drawn samples."""
    leaves = []
    for shard in shards:
        own = random.permutation(shard)
        if features is not None:
            own = np.concatenate(halved(own, features, random))
        own = own[: len(own) // LEAF * LEAF].reshape(-1, LEAF)
        leaves.append(own[random.permutation(len(own))])
    ids = np.concatenate(leaves, axis=1).ravel()
    return ids[: len(ids) // BATCH * BATCH].reshape(-1, BATCH)


def halved(ids: Ids, features: NDArray[np.float32], random: np.random.Generator) -> list[Ids]:
    """Halve by a random direction until a leaf is left; both halves but the last are whole leaves."""
    if len(ids) <= LEAF:
        return [ids]
    own = features[ids]
    ids = ids[np.argsort(own @ random.standard_normal(own.shape[1], np.float32))]
    middle = max(1, round(len(ids) / 2 / LEAF)) * LEAF
    return halved(ids[:middle], features, random) + halved(ids[middle:], features, random)


@torch.no_grad()
def scores(pair: Pair, data: Icons) -> dict[str, float]:
    """R@1 among the test pairs; of equal captions, any is right."""
    first, second = pair.eval()(data.pixels[:TESTED], data.words[:TESTED])
    same = torch.from_numpy(np.unique(data.words[:TESTED].numpy(), axis=0, return_inverse=True)[1].reshape(-1))
    ways = {"image_to_text": first @ second.T, "text_to_image": second @ first.T}
    return {name: 100 * float((same[similarity.argmax(1)] == same).float().mean()) for name, similarity in ways.items()}


def said(found: dict[str, dict[str, float]]) -> str:
    """Return a table of R@1, mean of both ways, and the paired difference from the uniform order with its error."""
    by: dict[tuple[str, str], dict[str, float]] = {}
    for run, line in found.items():
        _, objective, order, seed = run.rsplit("-", 3)
        by.setdefault((objective, order), {})[seed] = (line["image_to_text"] + line["text_to_image"]) / 2
    rows = []
    for (objective, order), of_seeds in by.items():
        uniform, paired = by[objective, "uniform"], ""
        differences = [value - uniform[seed] for seed, value in of_seeds.items() if seed in uniform]
        if order != "uniform" and len(differences) > 1:
            paired = f"{fmean(differences):+.2f} ± {stdev(differences) / math.sqrt(len(differences)):.2f}"
        rows.append((objective, order, str(len(of_seeds)), f"{fmean(of_seeds.values()):.1f}", paired))
    return table(("objective", "order", "seeds", "R@1", "beside uniform, paired"), rows)


if __name__ == "__main__":
    main()
