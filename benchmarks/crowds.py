"""What `thermopile inspect` says of a crowd: a class whose samples are copies of one picture, but for noise.

For every seed, share and rho: glyphs and a crowd of one drawing with one caption, which is that share of all, trained
with the demo's preset. Datasets and runs stay in FOLDER, so a later call makes only what is missing.

Examples:
  python -m benchmarks.crowds crowds
  python -m benchmarks.crowds crowds --seed 3 --share 0.19 --rho 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from thermopile.pipeline.sources import Groups, Sample
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.storage.local import LocalPath
from thermopile.tools.bench.machine import describe_machine, words_of
from thermopile.tools.inspection.findings import look
from thermopile.tools.inspection.temperatures.kinds import KIND_NAMES, read_rules
from thermopile.tools.report.grouping import lede

from .glyph_runs import converted, trained
from .markdown import table

CROWD = "CROWD"
CAPTION = "a starburst clip art"
RARE_CLASS = 10
"""Samples of a class that counts as rare, at most."""


class CrowdSource(GlyphSource):
    """Glyphs and a crowd: one drawing, `share` of all samples, each copy with its own noise of 6 grey levels."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__(seed)
        self.glyphs, self.share = super().__len__(), share
        self.copies = round(self.glyphs * share / (1 - share))
        rng = np.random.default_rng([seed, 20])
        self.drawing = np.kron(rng.integers(0, 256, (8, 8, 3)), np.ones((4, 4, 1)))

    def __len__(self) -> int:
        return self.glyphs + self.copies

    def describe(self) -> dict[str, Any]:
        return {"kind": "crowd", "seed": self.seed, "share": self.share}

    def groups(self) -> Groups:
        names, of_sample = super().groups()
        crowd = np.full(self.copies, len(names), np.int32)
        return Groups((*names, CROWD), np.concatenate([of_sample, crowd]))

    def captions(self, indices: NDArray[np.int64]) -> Iterator[str]:
        return (self[index].caption or "" for index in indices.tolist())

    def uri(self, index: int) -> str:
        return super().uri(index) if index < self.glyphs else f"crowd:{index}"

    def __getitem__(self, index: int) -> Sample:
        if index < self.glyphs:
            return super().__getitem__(index)
        noise = np.random.default_rng([self.seed, 21, index]).normal(0, 6, self.drawing.shape)
        picture = Image.fromarray(np.clip(self.drawing + noise, 0, 255).astype(np.uint8), "RGB")
        return Sample(self.uri(index), self.key(index), picture, CAPTION, CROWD)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", "seeds", multiple=True, default=(3, 4, 5), show_default=True)
@click.option("--share", "shares", multiple=True, default=(0.19, 0.08, 0.03), show_default=True)
@click.option("--rho", "rhos", multiple=True, default=(1.0, 2.0), show_default=True)
def main(folder: Path, seeds: tuple[int, ...], shares: tuple[float, ...], rhos: tuple[float, ...]) -> None:
    folder.mkdir(exist_ok=True)
    rows = []
    for share, rho, seed in product(shares, rhos, seeds):
        data = converted(CrowdSource(seed, share), folder / f"data-{share:g}-{seed}", seed)
        run = trained(data, folder / f"run-{share:g}-{rho:g}-{seed}", {"seed": seed, "objective.rho": f"{rho:g}"})
        rows.append((f"{share:.0%}", f"{rho:g}", f"{math.exp(-rho):.1%}", str(seed), *_found(run)))
    heading = ("share", "rho", "exp(-rho)", "seed", "of the crowd", "of small classes", "others crowded", "said first")
    click.echo(f"{words_of(describe_machine('torch'))}\n\n{table(heading, rows)}")


def _found(run: Path) -> tuple[str, str, str, str]:
    """The kinds of the crowd, how many samples of small classes are rare, and what the report says first."""
    found = look(LocalPath(run))
    inspection, reader, dataset = found.inspection, found.inspection.reader, found.inspection.dataset
    assert reader is not None
    assert dataset is not None
    rules = read_rules(inspection)
    kinds = np.array(KIND_NAMES)[rules.kinds(reader.rows(0, reader.samples, rules.columns))]
    group = np.array(dataset.column("group").to_pylist())
    _, of, sizes = np.unique(group, return_inverse=True, return_counts=True)
    is_crowd, small = group == CROWD, kinds[sizes[of] <= RARE_CLASS]
    shares = [f"{name} {share:.1%}" for name in KIND_NAMES if (share := (kinds[is_crowd] == name).mean())]
    others = int((kinds[~is_crowd] == "crowded").sum())
    said = " ".join([*found.said_first, lede(found.survey)])
    return ", ".join(shares), f"{(small == 'rare').sum()} of {len(small)} rare", f"{others}", said


if __name__ == "__main__":
    main()
