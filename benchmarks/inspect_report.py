"""`thermopile inspect` on a run of many samples, made for the purpose: its time, its memory and its page.

\b
beside_pandas  10⁷ samples, and the exported state looked at with pandas, turn by turn
alone          10⁸ samples, without pandas
"""

from __future__ import annotations

import base64
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .harness import Figure, Measured, Part, counted, isolated, peak_memory, script, timed

if TYPE_CHECKING:
    from thermopile.pipeline.opening import Dataset

SNAPSHOTS = 3
ENDS = 72
"""Samples that each end of pandas' page shows, as many as the report's."""


@dataclass(frozen=True)
class Sizes:
    """A run on pairs with six fields a row, and its dataset."""

    rows: int = 10**7
    """Rounded up to whole shards."""
    pandas: int = 1
    """Whether pandas takes turns: 1, or 0."""
    rounds: int = 3


class Took(NamedTuple):
    """One process."""

    seconds: float
    """From its start to its end."""
    peak_bytes: int
    """Most memory that it had, pages of mapped files included."""


def measure(sizes: Sizes, directory: Path) -> Measured:
    """Make the run, then let `inspect`, and pandas where it is asked for, write its page in turn."""
    samples, shards = isolated(make_run, sizes.rows, directory)
    run, exported, page = directory / "run", directory / "rows.parquet", directory / "plain.html"
    export_seconds = timed(thermopile, "inspect", run, "--export", exported) if sizes.pandas else 0.0
    ours, theirs = [], []
    for _ in counted("report: rounds", sizes.rounds):
        ours.append(took(thermopile, "inspect", run))
        if sizes.pandas:
            theirs.append(took(write_page, exported, page))
    seconds, their_seconds = ([each.seconds for each in some] for some in (ours, theirs))
    peak, page_bytes = max(each.peak_bytes for each in ours), (run / "report" / "report.html").stat().st_size
    if sizes.pandas:
        figures = [
            Figure.of_rounds("seconds", "time", "s", seconds, their_seconds, at_most=30),
            Figure("peak_megabytes", "peak memory", "MB", peak / 1e6, max(each.peak_bytes for each in theirs) / 1e6,
                   at_most=1000),
            Figure("page_megabytes", "the page", "MB", page_bytes / 1e6, page.stat().st_size / 1e6, at_most=8),
            Figure("export_seconds", "export, for pandas", "s", export_seconds),
        ]  # fmt: skip
    else:
        figures = [
            Figure("seconds", "time", "s", median(seconds)),
            Figure("peak_megabytes", "peak memory", "MB", peak / 1e6, at_most=1000),
            Figure("page_megabytes", "the page", "MB", page_bytes / 1e6, at_most=8),
        ]
    return Measured(
        f"a report on {samples:,} pairs of six fields in {shards:,} shards, {1 + SNAPSHOTS} snapshots; medians of "
        f"{sizes.rounds}, of memory the most",
        "pandas, all rows in memory, without pictures" if theirs else "",
        figures,
        notes=["Time is from the start of a process to its end; the files were written just before."],
    )


def thermopile(*words: str | Path) -> int:
    """Run the command line, which must succeed; return the most memory in bytes that it had."""
    command = [sys.executable, "-m", "thermopile.tools.cli", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def took(work: Callable[..., int], *arguments: Any) -> Took:
    """Call work(*arguments), which returns a number of bytes, in a fresh process."""
    began = time.perf_counter()
    peak_bytes = isolated(work, *arguments)
    return Took(time.perf_counter() - began, peak_bytes)


def make_run(rows: int, directory: Path) -> tuple[int, int]:
    """Write `directory`/dataset and `directory`/run: a run of iSogCLR with three snapshots after its start.

    Nothing is trained. Each snapshot puts every row twice more, so that samples of nearly all kinds occur; tau rises
    with the size of the sample's class, as after a training that worked. Return the numbers of samples and shards.
    """
    # Imported here: the measured processes import this file, and torch would count.
    from torch import from_numpy

    from thermopile.pipeline.sources.shards import shard_count
    from thermopile.state_store.store import StateStore
    from thermopile.trainer.config import load_config
    from thermopile.trainer.run.build import create_order, objective_of, resolve
    from thermopile.trainer.run_directory import RunDirectory

    from .made import make_pairs

    shards = shard_count(rows, None)
    dataset = make_pairs(directory / "dataset", -(-rows // shards), shards)
    tree = {"batch_size": min(1024, dataset.n), "data": {"path": str(dataset.path)}, "objective": {"name": "isogclr"}}
    config = resolve(load_config(tree), dataset)[0]
    objective, run = objective_of(config), RunDirectory(directory / "run")
    run.create(config, lambda: None)
    start, target, pieces = np.log(objective.fields["image/tau"]), _target(dataset), range(0, dataset.n, 1 << 20)
    with StateStore.create(
        run.state, dataset.n, objective.fields, dataset_fingerprint=dataset.index.fingerprint,
        block_rows=create_order(config, dataset, objective).block_rows,
    ) as store:  # fmt: skip
        for done in counted("making the state", SNAPSHOTS * len(pieces)):
            epoch, piece = divmod(done, len(pieces))
            ids = np.arange(pieces[piece], min(pieces[piece] + pieces.step, dataset.n))
            share = (1 + epoch) / SNAPSHOTS
            middle = (1 - share) * start + share * target[ids % len(target)]
            rows_of_ids = _rows(int(ids[0]), middle, spread=0.3 * share).items()
            put = {name: from_numpy(values) for name, values in rows_of_ids}
            for _ in range(2):
                store.put(ids, put, step=1 + done)
            if piece == len(pieces) - 1:
                store.snapshot(1 + done, epoch=1 + epoch).result()
    return dataset.n, shards


def _target(dataset: Dataset) -> NDArray[np.float32]:
    """Where log tau goes, by class size, for the rows of a shard, float32 [rows]."""
    groups = next(dataset.tables(["group"], int(dataset.first_id[1])))["group"]
    _, codes, sizes = np.unique(groups.to_numpy().astype(str), return_inverse=True, return_counts=True)
    target: NDArray[np.float32] = np.log(0.02 * sizes[codes] ** 0.25).astype(np.float32)
    return target


def _rows(seed: int, log_tau: NDArray[np.float32], spread: float) -> dict[str, NDArray[np.float32]]:
    """The state of samples whose log tau lies about these, float32 [m], with this standard deviation."""
    random, rows = np.random.default_rng(seed), {}
    for side in ("image", "text"):
        rows[f"{side}/tau"] = np.exp(log_tau + random.normal(0, spread, len(log_tau))).clip(0.005, 1)
        rows[f"{side}/log_s"] = random.normal(-2, 1, len(log_tau))
        rows[f"{side}/u"] = random.normal(0, 0.1, len(log_tau))
    return {name: values.astype(np.float32) for name, values in rows.items()}


def write_page(exported: Path, page: Path) -> int:
    """The same look in pandas, as one would write it in a notebook; return the most memory in bytes that it took.

    All rows lie in memory. No pictures, captions, intervals or permuted control.
    """
    import pandas as pd
    import pyarrow.parquet as pq

    fields = [name for name in pq.read_schema(exported).names if "/" in name]
    frame = pd.read_parquet(exported, columns=[*fields, "visits", "last_step", "group"])
    frame["group"] = frame["group"].astype("category")
    taus = [name for name in fields if name.endswith("/tau")]
    groups = frame.groupby("group", observed=True)[taus].mean()
    groups["size"] = frame["group"].value_counts()
    content = [
        frame[fields].describe(percentiles=[0.05, 0.25, 0.5, 0.75, 0.95]).to_html(),
        frame[taus].corr(method="spearman").to_html(),
        groups.corr(method="spearman").to_html(),
        groups.sort_values("size", ascending=False).to_html(),
        *(frame.nsmallest(ENDS, tau).to_html() for tau in taus),
        *(frame.nlargest(ENDS, tau).to_html() for tau in taus),
        *(_histogram(frame[name].to_numpy()) for name in [*fields, "visits", "last_step"]),
    ]
    page.write_text("<meta charset=utf-8>" + "".join(content), "utf-8")
    return peak_memory()


def _histogram(values: NDArray[Any]) -> str:
    from matplotlib.figure import Figure as Drawing

    drawing, file = Drawing(), BytesIO()
    drawing.subplots().hist(values, bins=100)
    drawing.savefig(file, format="png")
    return f'<img src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


PARTS = {
    "beside_pandas": Part(measure, Sizes(), Sizes(rows=1_000, rounds=1)),
    "alone": Part(measure, Sizes(10**8, pandas=0, rounds=1), Sizes(1_000, 0, 1)),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "torch", "zarr", "icechunk", "pandas", "matplotlib")()
