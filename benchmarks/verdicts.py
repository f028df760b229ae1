"""What a run on icons gains when it goes on without its first misfits, or without copies: paired, by R@1.

By seed, one run on 38,000 icons, preset `small`, 8 epochs. By its end, `curate` names the first 1 % of the misfits, and
all but one of each cluster of near-duplicates; the run is forked at half of its steps without either, and without as
many at random. A fork without any change ends as the run did, so that is the other side of each pair. R@1 is of 2,000
icons held out, mean of both ways, in percent. Runs are kept in the lines beside this module; a later call makes what is
missing. KINDS is the folder of benchmarks.kinds, and icons need resvg as it does.

\b
Example:
  PYTHONPATH=build/resvg python -m benchmarks.verdicts KINDS
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.stats import sem, t

from thermopile.pipeline.opening import Dataset

from .glyph_runs import recall, thermopile, trained
from .kinds import BATCH, DATA, Run, planted_data
from .markdown import table
from .reproduction.running import by_seed

LINES = Path(__file__).with_suffix(".jsonl")
MISFITS, HALF = 0.01, 0.5
"""Share of the samples that are called misfits, and of the steps after which a fork begins."""


@click.command(help=__doc__)
@click.argument("kinds", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seeds", default=3, show_default=True)
def main(kinds: Path, seeds: int) -> None:
    found = by_seed(LINES, seeds, partial(forks, kinds.absolute()))
    rows = []
    for name in found[0]["without"]:
        gains = [of["without"][name]["recall"] - of["recall"] for of in found]
        width = t.ppf(0.975, len(gains) - 1) * sem(gains)
        samples = fmean(of["without"][name]["samples"] for of in found)
        rows.append((name, f"{samples:,.0f}", f"{fmean(gains):+.2f} ± {width:.2f}"))
    click.echo(f"The runs as they were: R@1 {fmean(of['recall'] for of in found):.2f} %, {len(found)} seeds\n")
    click.echo(table(("forks without", "samples", "R@1, points, 95 %"), rows))


def forks(kinds: Path, seed: int) -> dict[str, Any]:
    """Return R@1 of a seed's run, and of each fork with its number of samples; all runs are removed."""
    of, out = DATA["icons-40000"], kinds / "runs"
    data = planted_data(kinds, Run("icons-40000", "plain", 0))
    samples, raw = Dataset(data).n, out / f"verdicts-{seed}"
    half = round(HALF * of.epochs * (samples // BATCH))
    settings = {"seed": seed, "epochs": of.epochs, "batch_size": BATCH, "checkpoint.every_steps": half,
                "checkpoint.keep_every": half, **of.settings}  # fmt: skip
    trained(data, raw, settings, preset=of.preset)
    thermopile("inspect", raw, "--duplicates")
    found: dict[str, Any] = {}
    for name, rule in (("misfits", ("--drop-misfits", round(MISFITS * samples))), ("copies", ("--thin", 1))):
        keep = out / f"verdicts-{seed}-{name}.parquet"
        thermopile("curate", raw, "--keep", keep, "--overwrite", *rule)
        dropped = keep.with_suffix(".dropped.parquet")
        of_dataset = pq.read_table(dropped)["dataset_fingerprint"]
        drawn = np.sort(np.random.default_rng(seed).permutation(samples)[: len(of_dataset)])
        as_many = keep.with_suffix(".random.parquet")
        pq.write_table(pa.table({"sample_id": drawn, "dataset_fingerprint": of_dataset}), as_many)
        for title, file in ((name, dropped), (f"as many as {name}, at random", as_many)):
            fork = out / f"verdicts-{seed}-fork"
            thermopile("fork", f"{raw}@step-{half}", "--out", fork, "--without", file)
            thermopile("train", "--resume", "--out", fork)
            found[title] = {"samples": len(drawn), "recall": recall(fork, data)}
            shutil.rmtree(fork)
    result = {"recall": recall(raw, data), "without": found}
    shutil.rmtree(raw)
    return result


if __name__ == "__main__":
    main()
