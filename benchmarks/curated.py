"""Training on a curated set against training on the raw one, on glyphs with swapped captions and near-duplicates.

For every seed: glyphs with 2 % of the captions swapped between classes and 2 % of near-duplicates; a run on all of them
with the demo's preset; `inspect --duplicates` and `curate --drop-misfits --thin 1` by that run; then new runs, of as
many steps to within one in a thousand, on what was kept, on as many random samples, and on all but the altered ones,
which only a test knows. R@1 is that of the unaltered test set. Everything stays in FOLDER, so a later call makes only
what is missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thermopile.pipeline.opening import Dataset
from thermopile.tools.bench.machine import describe_machine, words_of

from .glyph_runs import thermopile, trained
from .markdown import table

SEEDS, SHARE, EPOCHS, CURATED_EPOCHS = 3, 0.02, 20, 21
"""An epoch of the smaller sets has 41 steps, one of all samples 43: 861 and 860 steps."""


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    found: dict[str, list[tuple[int, int, float, float]]] = {}
    """Training set -> for every seed its samples, steps, and R@1 in both directions."""
    for seed in range(SEEDS):
        data = folder / f"glyphs-{seed}"
        if not data.exists():
            thermopile("convert", "glyphs", data, "--seed", seed, "--swap", SHARE, "--duplicate", SHARE)
        raw = trained(data, folder / f"all-{seed}", {"seed": seed, "epochs": EPOCHS})
        found.setdefault("all", []).append(scores(data, raw))
        for name, file in selections(folder, data, raw, seed).items():
            out, settings = folder / f"{name}-{seed}".replace(" ", "-"), {"seed": seed, "epochs": CURATED_EPOCHS}
            found.setdefault(name, []).append(scores(data, trained(data, out, settings, "--select", file)))
    rows = []
    for name, of_seeds in found.items():
        samples, steps, *both = zip(*of_seeds, strict=True)
        shares = [(f"{fmean(of_side):.1%}", ", ".join(f"{value:.1%}" for value in of_side)) for of_side in both]
        rows.append((name, ", ".join(f"{count:,}" for count in samples), str(steps[0]), *sum(shares, ())))
    heading = ("trained on", "samples", "steps", "image to text", "of each seed", "text to image", "of each seed")
    click.echo(f"{words_of(describe_machine('torch'))}\n\n{table(heading, rows)}")


def selections(folder: Path, data: Path, raw: Path, seed: int) -> dict[str, Path]:
    """Return the files of selected samples by name, written where they are missing."""
    names = {"curated": "curated", "as many, at random": "random", "all but the altered": "unaltered"}
    files = {name: folder / f"{file}-{seed}.parquet" for name, file in names.items()}
    curated, random, unaltered = files.values()
    if not curated.exists():
        thermopile("inspect", raw, "--duplicates")
        misfits = json.loads(thermopile("inspect", raw, "--features", "none", "--json"))["kinds"]["misfit"]["samples"]
        thermopile("curate", raw, "--keep", curated, *(("--drop-misfits", misfits) if misfits else ()), "--thin", 1)
    altered = np.array([told is not None for told in Dataset(data).column("altered").to_pylist()])
    drawn = np.random.default_rng(seed).permutation(len(altered))[: pq.read_metadata(curated).num_rows]
    pq.write_table(pa.table({"sample_id": np.sort(drawn)}), random)
    pq.write_table(pa.table({"sample_id": np.flatnonzero(~altered)}), unaltered)
    return files


def scores(data: Path, run: Path) -> tuple[int, int, float, float]:
    """Return the samples and steps of a run, and its R@1 on the test set, image to text and text to image, 0 … 1."""
    status = json.loads(thermopile("status", run, "--json"))
    found = json.loads(thermopile("eval", run, "--train", data, "--test", f"{data}-test", "--json"))["scores"]
    sides = (found[side]["1"]["all"] for side in ("image_to_text", "text_to_image"))
    return status["sample_state"]["samples"], status["total_steps"], *sides


if __name__ == "__main__":
    main()
