"""Messages of `thermopile convert` before and after a conversion."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from .plain_text import plain_text

if TYPE_CHECKING:
    from ..pipeline.conversion.convert import ConvertSettings, Summary
    from .convert_sources import Split


def announce(splits: list[Split]) -> None:
    """Print one line per dataset on stderr, and a warning if the disk may be too small."""
    from ..pipeline.conversion.partial import Partial
    from ..pipeline.conversion.plan import largest_bytes

    needed = 0
    for split in splits:
        stored = split.source.stored_bytes()
        here = None if stored is None else stored * split.samples // len(split.source)
        words = f"{split.out.name}: {split.samples:,} samples{_of_classes(split)}"
        if here is not None:
            needed += (most := largest_bytes(split.samples, here)) - bytes_written(Partial(split.out).path)
            words += f", {size(here)} in the source, at most about {size(most)} in {split.out}"
        click.echo(words, err=True)
    folder = _existing(splits[0].out)
    free = shutil.disk_usage(folder).free
    if needed > free:
        click.echo(f"Warning: this needs up to {size(needed)}, but only {size(free)} are free in {folder}; free some "
                   "space or lower --max-size. If the disk fills up, continue with --resume.", err=True)  # fmt: skip


def say_summary(summary: Summary, split: Split, settings: ConvertSettings) -> None:
    """Print what was converted on stdout."""
    from ..pipeline.dataset_index import ERRORS_FILE

    if not summary.seen:
        click.echo(f"{summary.path} is complete: {_result(summary, split)}; nothing to convert")
    else:
        rate = summary.seen / max(summary.seconds, 1e-9)
        click.echo(f"{summary.path}: {_result(summary, split)}; {summary.seconds:.1f} s, {rate:,.0f} img/s")
    if summary.left_out:
        reasons = "; ".join(f"{count:,} × {plain_text(reason, 80)}" for reason, count in summary.reasons)
        click.echo(f"  {summary.left_out:,} left out, see {summary.path / ERRORS_FILE}: {reasons}")
    if summary.truncated:
        click.echo(f"  {summary.truncated:,} captions were truncated to {settings.context_length} tokens")


def say_next(out: Path) -> None:
    """Suggest the next commands: show, then train."""
    click.echo(f"next: thermopile show {out} --out {out.name}.png; thermopile train --data {out} --out runs/{out.name}")


def size(count: int) -> str:
    """Format a number of bytes."""
    number, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while number >= 1000 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.0f} {units[0]}" if units[0] == "B" else f"{number:.1f} {units[0]}"


def _result(summary: Summary, split: Split) -> str:
    shards = "1 shard" if summary.shards == 1 else f"{summary.shards:,} shards"
    return f"{summary.samples:,} samples{_of_classes(split)} in {shards}, {size(bytes_written(summary.path))}"


def bytes_written(folder: Path) -> int:
    """Return the bytes of all files in a folder, 0 if it is missing; files may vanish while they are counted."""
    return sum(_file_size(file) for file in folder.rglob("*"))


def _file_size(file: Path) -> int:
    try:
        found = file.stat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _of_classes(split: Split) -> str:
    if split.groups is None:
        return ""
    of_sample = split.groups.of_sample if split.selection is None else split.groups.of_sample[split.selection]
    unlabelled = [i for i, name in enumerate(split.groups.names) if not name]  # samples without a class share one
    return f" of {len(np.setdiff1d(of_sample, unlabelled)):,} classes"


def _existing(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
