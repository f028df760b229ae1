"""`thermopile inspect` as a user calls it, and pandas, turn by turn, each in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ....pipeline.dataset_index import SHARD_FOLDER
from ..figure import Figure
from ..isolated import run_isolated
from ..machine import peak_memory
from ..measured import Measured
from ..progress import counted
from ..rounds import ratios
from .plain import write_page
from .sizes import SNAPSHOTS, Sizes

MAX_MEGABYTES = 1000
"""Asked of a report, whatever the number of samples."""
MAX_PAGE_MEGABYTES = 8


class Took(NamedTuple):
    """What one process took."""

    seconds: float
    """From its start to its end."""
    peak_bytes: int
    """Most memory that it had (VmHWM), pages of mapped files included."""


def measure(sizes: Sizes, directory: Path) -> Measured:
    """Make the run, then let `inspect`, and pandas where it is asked for, write its page in turn."""
    from .made_run import make_run  # not above: every measured process imports this module, and torch counts

    run = run_isolated(make_run, sizes, directory)
    state, page = directory / "state.parquet", directory / "plain.html"
    exported = took(thermopile, ["state", "export", str(run), "--to", str(state)]) if sizes.with_pandas else None
    ours, theirs = [], []
    for _ in counted("report: rounds", sizes.rounds):
        ours.append(took(thermopile, ["inspect", str(run)]))
        if sizes.with_pandas:
            theirs.append(took(write_page, state, directory / "dataset" / SHARD_FOLDER, page))
    figures = [
        *figures_of(sizes, ours, theirs),
        Figure("page_megabytes", "the page", "MB", _megabytes(run / "report" / "report.html"),
               _megabytes(page) if theirs else None, at_most=MAX_PAGE_MEGABYTES),
    ]  # fmt: skip
    if exported:
        figures.append(Figure("export_seconds", "export, for pandas", "s", exported.seconds))
    return Measured(
        f"a report on {sizes.samples:,} pairs of six fields in {sizes.shards:,} shards, {1 + SNAPSHOTS} snapshots; "
        f"medians of {sizes.rounds}, of memory the most",
        "pandas, all rows in memory, without pictures" if theirs else "none",
        tuple(figures),
        notes=("Time is from the start of a process to its end; the files were written just before.",),
    )


def took(work: Callable[..., None], *arguments: Any) -> Took:
    """Call work(*arguments) in a fresh process."""
    began = time.perf_counter()
    peak_bytes = run_isolated(_peak_of, work, arguments)
    return Took(time.perf_counter() - began, peak_bytes)


def _peak_of(work: Callable[..., None], arguments: Sequence[Any]) -> int:
    work(*arguments)
    return peak_memory()


def thermopile(arguments: list[str]) -> None:
    """The command line's work; what it would print is not shown."""
    from ...cli import main

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        main(arguments, standalone_mode=False)


def figures_of(sizes: Sizes, ours: Sequence[Took], theirs: Sequence[Took]) -> tuple[Figure, Figure]:
    """Time and memory of `inspect`, beside those of pandas where it was asked for."""
    seconds, their_seconds = ([each.seconds for each in some] for some in (ours, theirs))
    peaks, their_peaks = ([each.peak_bytes / 1e6 for each in some] for some in (ours, theirs))
    return (
        Figure("seconds", "time", "s", median(seconds), median(their_seconds) if theirs else None,
               at_most=sizes.most_seconds, ratios=ratios(their_seconds, seconds) if theirs else ()),
        Figure("peak_megabytes", "peak memory", "MB", max(peaks), max(their_peaks) if theirs else None,
               at_most=MAX_MEGABYTES),
    )  # fmt: skip


def _megabytes(file: Path) -> float:
    return file.stat().st_size / 1e6
