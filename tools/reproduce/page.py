"""The page: the papers' claims beside what was seen; settings, scores and temperatures of every method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill

from ..._version import __version__
from .claims import CLAIMS, LONG_TAIL, NO, NOISE, NOT_TESTED, REVERSED, SHOWS
from .plan import METHODS, MODES, RATE, RATE_BATCH, RECIPES, SHARED, Mode, Plan
from .results import BANDS, MEASURES, Results
from .running import PROMPT

LINE = 120


def write_page(results: Results, plan: Plan, path: Path) -> Path:
    """Write the page, Markdown, and its picture beside it; return where the page is."""
    from ...files import write_atomically
    from .figure import draw_bands

    path.parent.mkdir(parents=True, exist_ok=True)
    picture = path.with_suffix(".png")
    write_atomically(picture, draw_bands(results, min(plan.batch_sizes)))
    write_atomically(path, to_markdown(results, plan, picture.name).encode())
    return path


def to_markdown(results: Results, plan: Plan, picture: str) -> str:
    """The page's text; picture: the file name of its picture."""
    parts = [
        "# Reproduction", _introduction(results, plan),
        "## The papers' claims", *_claims(results),
        "## What was run", *_settings(plan),
        "## Scores", *_scores(results, plan, picture),
        "## Temperatures", *_temperatures(results),
        "## Time", *_time(results),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _introduction(results: Results, plan: Plan) -> str:
    command = "make reproduce FULL=1" if len(plan.batch_sizes) > 1 else "make reproduce"
    return _paragraph(f"""
        `{command}` wrote this page, its picture and every figure in it, by {len(results.every)} runs of thermopile
        {__version__}. The papers train large encoders on up to hundreds of millions of samples, for days; here a small
        one learns for minutes from {results.every[0].samples:,} glyphs of 32 × 32 pixels, with classes that have a long
        tail. A claim that shows, shows on this data; one that does not may hold at the papers' size.""")


def _claims(results: Results) -> Iterator[str]:
    yield _table(
        ("claim", "source", "reported there", "seen here", "verdict"),
        [
            (claim.claim, claim.source, claim.reported, finding.seen, f"**{finding.verdict}**")
            for claim in CLAIMS
            for finding in [claim.judge(results)]
        ],
    )
    yield _paragraph(f"""
        The verdicts are computed. A difference in points stands with twice its standard error: that of drawing
        {results.every[0].test_samples:,} test samples, counted as if each method had been scored on others, which errs
        on the safe side, and that of the seeds, their variance pooled over the methods of a mode. Where a mode has one
        seed, its seeds' error is not known and not counted.""")
    yield _items(
        f'"Is above": **{SHOWS}** where the difference is above the error, **{REVERSED}** where it is below minus the '
        f"error, else **{NOISE}**. So for what one gains most with.",
        f'"Hardly depends on the batch size": **{SHOWS}** where the change is within the error, else **{NO}**.',
        f'"Low temperatures": **{SHOWS}** where Spearman\'s correlation of class size and tau is above '
        f"2 / √(classes − 1) in every run and side, which chance hardly gives; **{REVERSED}** where it is below minus "
        f"that in all, else **{NOISE}**.",
        f'"Near-Gaussian", "long tail": **{SHOWS}** where the skewness is within ±{LONG_TAIL} on images and above '
        f"{LONG_TAIL} on pairs, in every run and side, else **{NO}**.",
        f"**{NOT_TESTED}**: these runs have nothing to say about it, for the reason beside it.",
    )


def _settings(plan: Plan) -> Iterator[str]:
    epochs = ", ".join(f"{plan.epochs[mode]} {mode}" for mode in MODES)
    seeds = ", ".join(f"{plan.seeds[mode]} {mode}" for mode in MODES)
    shared = ", ".join(f"`{key}={value}`" for key, value in SHARED.items())
    recipes = ", ".join(f"`{recipe}` {mode}" for mode, recipe in RECIPES.items())
    yield _paragraph(f"""
        Methods of a mode differ in their objective alone. All runs have {shared}, the small built-in encoders, and a
        learning rate of {RATE:g} × batch / {RATE_BATCH} that falls by a cosine to 0. Batches:
        {", ".join(map(str, plan.batch_sizes))}. Epochs: {epochs}. Seeds: {seeds}. Augmentation: {recipes}.""")
    yield _table(
        ("mode", "objective", "settings", "tried"),
        [(method.mode, f"`{method.name}`", method.words, method.tried) for method in METHODS],
    )
    yield _paragraph("""
        What is not named has its default (docs/objectives.md). Settings were chosen among those tried by runs of 8
        epochs on glyphs drawn with `--seed 1`: another training set and another test set, in which other characters are
        frequent. The mean of both R@1 decided for pairs, the L-BFGS probe for images, over all classes. The
        augmentation of images was chosen so as well, by SimCLR's runs, of `clip`, `crop_flip` and `simclr_cifar`: a
        mirrored or cut glyph is another one. No score below decided anything, and every run is scored at its last
        step.""")


def _scores(results: Results, plan: Plan, picture: str) -> Iterator[str]:
    first = results.every[0]
    bands = ", ".join(f"{band} {count}" for band, count in first.classes_of_band.items())
    yield f"![Share of right answers by method and band of class frequency, as in the tables below]({picture})"
    yield _paragraph(f"""
        Right, in %, of a class-balanced test set of {first.test_samples:,} glyphs. Head, medium and tail are the thirds
        of the classes with most, fewer and fewest training samples ({bands}). {_spread_words(plan)} Neighbours and
        probes are of the training set, as in `thermopile eval`. Zero-shot prompts: "{PROMPT}".""")
    for mode in MODES:
        for batch_size in results.batch_sizes(mode):
            yield f"### {mode.capitalize()}, batch {batch_size}"
            yield _table(("", "objective", *BANDS), _score_rows(results, mode, batch_size))


def _spread_words(plan: Plan) -> str:
    match max(plan.seeds.values()):
        case 1:
            return "One seed."
        case 2:
            return "Means over seeds where there are two, with both in brackets."
        case _:
            return "Means over seeds ± their standard deviation."


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


def _temperatures(results: Results) -> Iterator[str]:
    rows: list[tuple[str, ...]] = []
    for result in results.every:
        run = result.run
        where = (run.method.mode, f"`{run.method.name}`", str(run.batch_size), str(run.seed))
        rows += [
            (*where, label, f"{side.mean:.3f}", _signed(side.skewness), _signed(side.spearman), _signed(side.permuted))
            for label, side in result.temperatures.items()
        ] or [(*where, *["–"] * 5)]
    yield _paragraph("""
        Spearman's correlation of class size and the class's mean tau, and the same with the samples' classes permuted.
        A dash: no sample has a temperature of its own.""")
    yield _table(("mode", "objective", "batch", "seed", "side", "mean tau", "skewness", "Spearman", "permuted"), rows)


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}".replace("-", "−")


def _time(results: Results) -> Iterator[str]:
    machines = {f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}, {m['gpu'] or 'no GPU'}"
                for m in (result.machine for result in results.every)}  # fmt: skip
    yield _paragraph(f"""
        Seconds of training, start-up included and scoring not; a dash where a run was stopped in between.
        {"; ".join(sorted(machines))}.""")
    yield _table(
        ("run", "seconds"),
        [(f"`{r.run.name}`", "–" if r.seconds is None else f"{r.seconds:.0f}") for r in results.every],
    )


def _paragraph(text: str) -> str:
    return fill(" ".join(text.split()), LINE, break_long_words=False, break_on_hyphens=False)


def _items(*texts: str) -> str:
    return "\n".join(
        fill(f"- {text}", LINE, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for text in texts
    )


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
