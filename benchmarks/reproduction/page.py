"""The page: the papers' claims beside what was seen; settings, scores and temperatures of every method.

Its words are in page.md; here are its figures and tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill
from typing import Any

from thermopile import __version__
from thermopile.files import write_atomically

from reproduction import claims
from reproduction import plan as plans
from reproduction.figure import draw_bands
from reproduction.plan import METHODS, MODES, Mode, Plan
from reproduction.results import BANDS, MEASURES, Results
from reproduction.running import PROMPT

_SPREADS = {
    1: "One seed.",
    2: "Means over seeds where there are two, with both in brackets.",
    3: "Means over seeds ± their standard deviation.",
}
WORDS = Path(__file__).with_name("page.md")


def write_page(results: Results, plan: Plan, path: Path) -> Path:
    """Write the page, Markdown, and its picture beside it; return where the page is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = path.with_suffix(".png")
    write_atomically(picture, draw_bands(results, min(plan.batch_sizes)))
    write_atomically(path, to_markdown(results, plan, picture.name).encode())
    return path


def to_markdown(results: Results, plan: Plan, picture: str) -> str:
    """The page's text; picture: the file name of its picture."""
    values = {**vars(claims), **vars(plans), **_of_plan(plan), **_of_results(results), "picture": picture,
              "version": __version__, "PROMPT": PROMPT}  # fmt: skip
    return "\n\n".join(_wrapped(block.format_map(values)) for block in WORDS.read_text("utf-8").split("\n\n"))


def _of_plan(plan: Plan) -> dict[str, Any]:
    return {
        "command": "make reproduce FULL=1" if len(plan.batch_sizes) > 1 else "make reproduce",
        "batches": ", ".join(map(str, plan.batch_sizes)),
        "epochs": ", ".join(f"{plan.epochs[mode]} {mode}" for mode in MODES),
        "seeds": ", ".join(f"{plan.seeds[mode]} {mode}" for mode in MODES),
        "shared": ", ".join(f"`{key}={value}`" for key, value in plans.SHARED.items()),
        "recipes": ", ".join(f"`{recipe}` {mode}" for mode, recipe in plans.RECIPES.items()),
        "methods": _table(("mode", "objective", "settings", "tried"),
                          [(method.mode, f"`{method.name}`", method.words, method.tried) for method in METHODS]),
        "spread": _SPREADS[min(max(plan.seeds.values()), 3)],
    }  # fmt: skip


def _of_results(results: Results) -> dict[str, Any]:
    first = results.every[0]
    machines = {f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}, {m['gpu'] or 'no GPU'}"
                for m in (result.machine for result in results.every)}  # fmt: skip
    return {
        "runs": len(results.every), "samples": first.samples, "test_samples": first.test_samples,
        "bands": ", ".join(f"{band} {count}" for band, count in first.classes_of_band.items()),
        "claims": _table(("claim", "source", "reported there", "seen here", "verdict"), [
            (claim.claim, claim.source, claim.reported, finding.seen, f"**{finding.verdict}**")
            for claim in claims.CLAIMS for finding in [claim.judge(results)]
        ]),
        "scores": "\n\n".join(
            f"### {mode.capitalize()}, batch {batch_size}\n\n"
            + _table(("", "objective", *BANDS), _score_rows(results, mode, batch_size))
            for mode in MODES for batch_size in results.batch_sizes(mode)
        ),
        "temperatures": _table(
            ("mode", "objective", "batch", "seed", "side", "mean tau", "skewness", "Spearman", "permuted"),
            _temperature_rows(results),
        ),
        "times": _table(("run", "seconds"), [
            (f"`{r.run.name}`", "–" if r.seconds is None else f"{r.seconds:.0f}") for r in results.every
        ]),
        "machines": "; ".join(sorted(machines)),
    }  # fmt: skip


def _score_rows(results: Results, mode: Mode, batch_size: int) -> Iterator[tuple[str, ...]]:
    for measure in MEASURES:
        label = measure.label
        for method in results.methods(mode):
            cells = [_spread(results.shares(mode, method, batch_size, measure, band)) for band in BANDS]
            if any(cells):
                yield (label, f"`{method}`", *(cell or "–" for cell in cells))
                label = ""  # said once, above the other methods


def _spread(shares: Sequence[float]) -> str:
    """Mean over seeds in per cent, and both if two, their standard deviation if more; empty where there is none."""
    points = [100 * share for share in shares]
    match len(points):
        case 0:
            return ""
        case 1:
            return f"{points[0]:.1f}"
        case 2:
            return f"{fmean(points):.1f} ({points[0]:.1f}, {points[1]:.1f})"
        case _:
            return f"{fmean(points):.1f} ± {stdev(points):.1f}"


def _temperature_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for result in results.every:
        run = result.run
        where: tuple[str, ...] = (run.method.mode, f"`{run.method.name}`", str(run.batch_size), str(run.seed))
        yield from [
            (*where, label, f"{side.mean:.3f}", _signed(side.skewness), _signed(side.spearman), _signed(side.permuted))
            for label, side in result.temperatures.items()
        ] or [(*where, *["–"] * 5)]


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}".replace("-", "−")


def _wrapped(block: str) -> str:
    """A block of Markdown with its paragraph or its items filled; headings, tables and pictures as they are."""
    if block[0] in "#|!":
        return block
    filled = [
        fill(" ".join(item.split()), 120, subsequent_indent="  " * item.startswith("- "), break_long_words=False,
             break_on_hyphens=False)
        for item in block.replace("\n- ", "\0- ").split("\0")
    ]  # fmt: skip
    return "\n".join(filled)


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
