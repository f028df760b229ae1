"""What every benchmark shares. A script is a dict of parts; `script` makes its command line of them.

A part is a function `measure(sizes, directory) -> Measured`, with its sizes twice: full, for which figures are asked,
and small, which takes seconds and is not judged. Each part runs in a process of its own, so that its peak memory is its
alone, in a temporary directory that is gone afterwards. Contenders take turns: what the machine does meanwhile to one,
it does to both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import click

from thermopile.tools.bench.machine import describe_machine, words_of
from thermopile.tools.progress import progress_bar

from .markdown import table

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """One measured number, the alternative's where there is one, and what is asked of ours or of the ratio."""

    name: str
    label: str
    unit: str
    ours: float
    alternative: float | None = None
    more_is_better: bool = False
    at_most: float | None = None
    ratio_at_least: float | None = None
    ratios: tuple[float, ...] = ()
    """How many times better ours was, round by round."""

    @classmethod
    def of_rounds(
        cls, name: str, label: str, unit: str, ours: Sequence[float], others: Sequence[float], **asked: Any
    ) -> Figure:
        """Compare the medians of rounds in turn. asked: more_is_better, at_most, ratio_at_least."""
        pairs = zip(ours, others, strict=True)
        ratios = tuple(one / other if asked.get("more_is_better") else other / one for one, other in pairs)
        return cls(name, label, unit, median(ours), median(others), ratios=ratios, **asked)

    @property
    def ratio(self) -> float | None:
        """How many times better ours is: the median of the rounds; None without an alternative, or where infinite."""
        if self.ratios:
            return median(self.ratios)
        if self.alternative is None:
            return None
        better, worse = (self.ours, self.alternative) if self.more_is_better else (self.alternative, self.ours)
        return better / worse if worse else None

    @property
    def asked(self) -> str:
        """In words; empty where nothing is."""
        bound = [] if self.at_most is None else [f"≤ {plain(self.at_most)} {self.unit}"]
        return ", ".join(bound if self.ratio_at_least is None else [*bound, f"ratio ≥ {plain(self.ratio_at_least)}"])

    @property
    def held(self) -> bool | None:
        """Whether the figure is what was asked; None where nothing was."""
        if not self.asked:
            return None
        is_low = self.at_most is None or self.ours <= self.at_most
        return is_low and (self.ratio_at_least is None or (self.ratio or 0.0) >= self.ratio_at_least)


@dataclass(frozen=True)
class Measured:
    """What a part has found out."""

    title: str
    """What was done, with its sizes."""
    versus: str
    """What the alternative is; empty without one."""
    figures: Sequence[Figure]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Part:
    """One measurement."""

    measure: Callable[[Any, Path], Measured]
    full: Any
    """A frozen dataclass of numbers and words: how much is measured."""
    small: Any


def script(about: str | None, parts: Mapping[str, Part], *packages: str) -> click.Command:
    """The command line of a benchmark; `packages` are those whose versions are told beside its figures."""

    @click.command(help=about)
    @click.option("--part", "chosen", type=click.Choice(list(parts)), multiple=True, help="Repeatable. Default: all.")
    @click.option("--scale", type=click.Choice(["full", "small"]), default="full", show_default=True)
    @click.option("--set", "changes", multiple=True, metavar="SIZE=VALUE",
                  help="Another size than the scale's, where the chosen parts have it; repeatable.")  # fmt: skip
    @click.option("--dir", "directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
                  help="Where temporary files go: on the disk that is to be measured.")  # fmt: skip
    @click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each part, one a line.")
    def command(
        chosen: tuple[str, ...], scale: str, changes: tuple[str, ...], directory: Path | None, as_json: bool
    ) -> None:
        known = {field.name for name in chosen or parts for field in fields(parts[name].full)}
        if wrong := [change for change in changes if change.split("=")[0] not in known or "=" not in change]:
            raise click.UsageError(f"--set {wrong[0]}: the sizes are {', '.join(sorted(known))}, each with =VALUE")
        machine = describe_machine(*packages)
        if not as_json:
            click.echo(words_of(machine))
        for name in chosen or parts:
            part = parts[name]
            sizes = _changed(part.full if scale == "full" else part.small, changes)
            judged = sizes == part.full
            seconds, measured, peak = _in_own_process(part.measure, sizes, directory)
            if as_json:
                about = {"part": name, "machine": machine, "sizes": asdict(sizes), "seconds": seconds}
                found = {"peak_memory_bytes": peak, **_to_json(measured, judged)}
                click.echo(json.dumps(about | found, allow_nan=False))
            else:
                _print(name, measured, f"{seconds:,.0f} s, peak memory {peak / 1e9:.2f} GB", judged)

    return command


def _changed(sizes: Any, changes: Sequence[str]) -> Any:
    """The sizes with those of `changes` that they have, in the type that they have there."""
    types = {field.name: type(getattr(sizes, field.name)) for field in fields(sizes)}
    given = dict(change.split("=", 1) for change in changes)
    return replace(sizes, **{name: types[name](value) for name, value in given.items() if name in types})


def _in_own_process(measure: Callable[[Any, Path], Measured], sizes: Any, directory: Path | None) -> Any:
    with TemporaryDirectory(prefix="thermopile-benchmark-", dir=directory) as temporary:
        return isolated(_measure_here, measure, sizes, Path(temporary))


def _measure_here(measure: Callable[[Any, Path], Measured], sizes: Any, directory: Path) -> tuple[float, Measured, int]:
    began = time.monotonic()
    measured = measure(sizes, directory)
    return time.monotonic() - began, measured, peak_memory()


def isolated(function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, both picklable, called in a fresh process."""
    # A fork would begin with this process's memory, and with the locks of its threads.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def take_turns(title: str, measures: Mapping[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Call each measure(round) once a round, after a round 0 that only warms up; what they returned."""
    found: dict[str, list[float]] = {contender: [] for contender in measures}
    for number in counted(title, 1 + rounds):
        for contender, measure in measures.items():
            value = measure(number)
            if number > 0:
                found[contender].append(value)
    return found


def timed(call: Callable[..., object], *arguments: Any, **named: Any) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call(*arguments, **named)
    return time.perf_counter() - began


def counted(title: str, total: int) -> Iterator[int]:
    """Yield 0 … total - 1, with the progress on stderr."""
    with progress_bar(title, total) as bar:
        for done in range(total):
            yield done
            bar.update(done + 1)


def proc_bytes(file: str, key: str) -> int:
    """Return the value of `key` in /proc/`file`, which counts in kB; the first of that key."""
    lines = (line.partition(":") for line in Path("/proc", file).read_text().splitlines())
    return next(int(value.removesuffix("kB")) * 1024 for name, _, value in lines if name == key)


def memory_in_use() -> int:
    """Bytes of RAM that this process has now."""
    return proc_bytes("self/status", "VmRSS")


def peak_memory() -> int:
    """Most bytes of RAM that this process ever had."""
    return proc_bytes("self/status", "VmHWM")


def plain(value: float) -> str:
    """Three digits or more, without an exponent."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2 if size >= 0.1 else 4}f}"


def _to_json(measured: Measured, judged: bool) -> dict[str, Any]:
    figures = {
        figure.name: asdict(figure)
        | {"ratio": figure.ratio, "asked": figure.asked, "held": figure.held if judged else None}
        for figure in measured.figures
    }
    return {"title": measured.title, "versus": measured.versus, "figures": figures, "notes": list(measured.notes)}


def _print(part: str, measured: Measured, took: str, judged: bool) -> None:
    click.echo(f"\n{part}: {measured.title}\nalternative: {measured.versus or 'none'}; {took}")
    rows = []
    for figure in measured.figures:
        values = (figure.ours, figure.alternative)
        both = ("" if value is None else f"{plain(value)} {figure.unit}" for value in values)
        ratio = "" if figure.ratio is None else plain(figure.ratio)
        if figure.ratios:
            ratio += f" ({plain(min(figure.ratios))}–{plain(max(figure.ratios))})"
        verdict = "" if figure.held is None or not judged else ": held" if figure.held else ": missed"
        rows.append((figure.label, *both, ratio, figure.asked + verdict))
    click.echo(table(("figure", "ours", "alternative", "ratio", "asked"), rows))
    for note in measured.notes:
        click.echo(note)
