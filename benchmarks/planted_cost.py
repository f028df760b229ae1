"""What captions that are planted cost: R@1 of runs with 1 % of them, and of forks that train on without them.

By seed, three runs on 38,000 icons, preset `small`, 8 epochs: `plain` has no planted caption, `planted` has
data.planted 0.01, and `fork` is `planted` with the right captions in the last tenth of its steps. R@1 is of 2,000 icons
held out, mean of both ways, in percent; differences are paired by seed. Runs are kept in the lines beside this module;
a later call makes what is missing. KINDS is the folder of benchmarks.kinds, and icons need resvg as it does.

\b
Example:
  PYTHONPATH=build/resvg python -m benchmarks.planted_cost KINDS --seeds 8
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from statistics import fmean

import click
from scipy.stats import sem, t

from thermopile.pipeline.opening import Dataset

from .glyph_runs import recall, thermopile, trained
from .kinds import BATCH, DATA, Run, planted_data
from .markdown import table
from .reproduction.running import by_seed

LINES = Path(__file__).with_suffix(".jsonl")
SHARE, KEPT = 0.01, 0.9
"""Share of the captions that are planted, and of the steps after which the fork begins."""


@click.command(help=__doc__)
@click.argument("kinds", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seeds", default=8, show_default=True)
def main(kinds: Path, seeds: int) -> None:
    found = [line["recall"] for line in by_seed(LINES, seeds, partial(recalls, kinds.absolute()))]
    rows = []
    for name in ("planted", "fork"):
        cost = [recall["plain"] - recall[name] for recall in found]
        upper = fmean(cost) + t.ppf(0.95, len(cost) - 1) * sem(cost)
        means = (fmean(recall[each] for recall in found) for each in ("plain", name))
        rows.append((name, str(len(cost)), *(f"{mean:.2f}" for mean in means), f"{fmean(cost):+.2f} ± {sem(cost):.2f}",
                     f"{upper:+.2f}"))  # fmt: skip
    click.echo(table(("run", "seeds", "R@1 of plain runs", "R@1", "cost", "its upper bound, 95 %"), rows))


def recalls(kinds: Path, seed: int) -> dict[str, dict[str, float]]:
    """R@1 in percent of the three runs of a seed, which are removed."""
    of, out = DATA["icons-40000"], kinds / "runs"
    data = planted_data(kinds, Run("icons-40000", "plain", 0))
    kept = round(KEPT * of.epochs * (Dataset(data).n // BATCH))
    settings = {"seed": seed, "epochs": of.epochs, "batch_size": BATCH, "checkpoint.every_steps": kept, **of.settings}
    plain, planted, fork = (out / f"cost-{name}-{seed}" for name in ("plain", "planted", "fork"))
    trained(data, plain, settings, preset=of.preset)
    trained(data, planted, settings | {"data.planted": SHARE, "checkpoint.keep_every": kept}, preset=of.preset)
    if not fork.exists():
        thermopile("fork", f"{planted}@step-{kept}", "--out", fork, "--set", "data.planted=0")
    thermopile("train", "--resume", "--out", fork)
    found = {name: recall(run, data) for name, run in (("plain", plain), ("planted", planted), ("fork", fork))}
    for run in (plain, planted, fork):
        shutil.rmtree(run)
    return {"recall": found}


if __name__ == "__main__":
    main()
