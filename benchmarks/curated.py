"""Training on a curated set against training on the raw one, on glyphs with swapped captions and near-duplicates.

For every seed: glyphs with 2 % of the captions swapped between classes and 2 % of near-duplicates; a run on all of them
with the demo's preset; `inspect --duplicates` and `curate --drop-misfits --thin 1` by that run; then new runs, of as
many steps to within one in a thousand, on what was kept, on as many random samples, and on all but the altered ones,
which only a test knows. R@1 is that of the unaltered test set. Everything stays in FOLDER, so a later call makes only
what is missing.

Examples:
  python -m benchmarks.curated curated
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner

from thermopile.pipeline.dataset import Dataset
from thermopile.tools.bench.machine import describe_machine, words_of
from thermopile.tools.cli import main as thermopile

SHARE, EPOCHS, CURATED_EPOCHS = 0.02, 20, 21
"""An epoch of the smaller sets has 41 steps, one of all samples 43: 861 and 860 steps."""


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1))
def main(folder: Path, seeds: int) -> None:
    folder.mkdir(exist_ok=True)
    found: dict[str, list[tuple[int, int, float, float]]] = {}
    """Training set -> for every seed its samples, steps, and R@1 in both directions."""
    for seed in range(seeds):
        data, raw = folder / f"glyphs-{seed}", folder / f"all-{seed}"
        if not data.exists():
            run("convert", "glyphs", data, "--seed", seed, "--swap", SHARE, "--duplicate", SHARE)
        train(data, raw, seed, EPOCHS)
        found.setdefault("all", []).append(scores(data, raw))
        for name, file in selections(folder, data, raw, seed).items():
            out = folder / f"{name}-{seed}".replace(" ", "-")
            train(data, out, seed, CURATED_EPOCHS, "--select", file)
            found.setdefault(name, []).append(scores(data, out))
    click.echo(words_of(describe_machine("torch")) + "\n")
    click.echo("| trained on | samples | steps | image to text | of each seed | text to image | of each seed |")
    click.echo("|---|---|---|---|---|---|---|")
    for name, of_seeds in found.items():
        samples, steps, *both = zip(*of_seeds, strict=True)
        cells = [f"{fmean(of_side):.1%} | {', '.join(f'{value:.1%}' for value in of_side)}" for of_side in both]
        click.echo(f"| {name} | {', '.join(f'{count:,}' for count in samples)} | {steps[0]} | {' | '.join(cells)} |")


def selections(folder: Path, data: Path, raw: Path, seed: int) -> dict[str, Path]:
    """Return the files of selected samples by name, written where they are missing."""
    names = {"curated": "curated", "as many, at random": "random", "all but the altered": "unaltered"}
    files = {name: folder / f"{file}-{seed}.parquet" for name, file in names.items()}
    curated, random, unaltered = files.values()
    if not curated.exists():
        run("inspect", raw, "--duplicates")
        run("curate", raw, "--keep", curated, "--drop-misfits", "--thin", 1)
    altered = np.array([told is not None for told in Dataset(data).column("altered").to_pylist()])
    drawn = np.random.default_rng(seed).permutation(len(altered))[: pq.read_metadata(curated).num_rows]
    pq.write_table(pa.table({"sample_id": np.sort(drawn)}), random)
    pq.write_table(pa.table({"sample_id": np.flatnonzero(~altered)}), unaltered)
    return files


def train(data: Path, out: Path, seed: int, epochs: int, *more: str | Path) -> None:
    settings = ("--set", f"seed={seed}", "--set", f"epochs={epochs}")
    run("train", "--preset", "glyphs", "--data", data, "--out", out, "--resume", *settings, *more)


def scores(data: Path, out: Path) -> tuple[int, int, float, float]:
    """Return the samples and steps of a run, and its R@1 on the test set, image to text and text to image, 0 … 1."""
    status = json.loads(run("status", out, "--json"))
    found = json.loads(run("eval", out, "--train", data, "--test", f"{data}-test", "--json"))["scores"]
    sides = (found[side]["1"]["all"] for side in ("image_to_text", "text_to_image"))
    return status["sample_state"]["samples"], status["total_steps"], *sides


def run(*words: object) -> str:
    """Run a command of thermopile and return what it printed. Raises RuntimeError if it fails."""
    done = CliRunner().invoke(thermopile, [str(word) for word in words])
    if done.exit_code:
        raise RuntimeError(f"thermopile {' '.join(map(str, words))}\n{done.output}")
    return done.stdout


if __name__ == "__main__":
    main()
