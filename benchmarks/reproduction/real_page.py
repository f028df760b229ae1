"""The page on real data: the claims' verdicts, what to choose, and the scores. Its words are in real_page.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from ..markdown import table
from .claims import LEVEL, NOT_TESTED, SHOWS, signed, verdict
from .comparison import ALL
from .page import chosen_words, claims_of, of_results, plain, wrapped
from .real import METHODS, PLAN, TRIALS, VARIANTS
from .real_claims import GROUPS, MOST_FURTHER, Real, every_part
from .results import KNN, PROBE, RETRIEVAL, Measure, Results

WORDS = Path(__file__).with_name("real_page.md")
Column = tuple[str, Measure, str]
"""Heading, score, band."""
ON_ICONS: list[Column] = [("at random", RETRIEVAL, ALL), ("rare words", RETRIEVAL, "tail"),
                          ("sets held out", RETRIEVAL, "held out")]  # fmt: skip
ON_GLYPHS: list[Column] = [("R@1", RETRIEVAL, ALL), ("tail", RETRIEVAL, "tail")]
ON_IMAGES: list[Column] = [
    ("linear probe", PROBE, ALL),
    ("head", PROBE, "head"),
    ("tail", PROBE, "tail"),
    ("k-NN", KNN, ALL),
]


def to_markdown(results: Results) -> str:
    """The page's text."""
    runs = Real(results)
    *groups, untested = GROUPS
    found = {claim.claim: claim.judge(runs) for group in groups for claim in group.claims}
    counts = Counter(each.verdict for each in found.values())
    of = {
        on: [name for name in VARIANTS if name.partition(" ")[0] == on] for on in ("icons", "all", "glyphs", "fashion")
    }
    decided = ", ".join(f"{count} **{name}**" for name, count in counts.most_common())
    values = {
        "decided": f"Of {len(found)} claims: {decided}.",
        "choices": "\n".join(_choice(runs, **each) for each in PLAN["choice"]),
        "claims": "\n\n".join(claims_of(group, found, {}) for group in groups),
        "untested": table(
            ("claim", "of", "why not"), [(each.claim, each.source, str(each.check)) for each in untested.claims]
        ),
        "icons_table": _scores(runs, "icons", [*of["icons"], *of["all"]], ON_ICONS),
        "glyphs_table": _scores(runs, "glyphs", of["glyphs"], ON_GLYPHS),
        "fashion_table": _scores(runs, "Fashion-MNIST", of["fashion"], ON_IMAGES),
        "classes_table": _by_class(runs),
        "LEVEL": LEVEL,
        "trials": TRIALS,
        "further": MOST_FURTHER,
        **of_results(results, every_part()),
    }
    return "\n\n".join(wrapped(block.format_map(values)) for block in WORDS.read_text("utf-8").split("\n\n"))


def _choice(runs: Real, of: str, band: str, among: Sequence[str]) -> str:
    """One line: the best, what is not told apart from it, and what is clearly below."""
    means = {name: mean for name in among if (mean := runs.mean(runs.of(name), band=band))}
    if len(means) < len(among):
        return f"- **{of}**: {NOT_TESTED} yet"
    best = max(means, key=lambda name: means[name].points)
    gaps = {name: gap for name in among if name != best and (gap := runs.gap(runs.of(best), runs.of(name), band=band))}
    level = [f"`{name}`" for name, gap in gaps.items() if verdict(gap) != SHOWS]
    below = [f"`{name}` ({signed(gap)})" for name, gap in gaps.items() if verdict(gap) == SHOWS]
    told = [f"not told apart: {', '.join(level)}"] * bool(level) + [f"it is above {', '.join(below)}"] * bool(below)
    return f"- **{of}**: `{best}`, {plain(means[best])}; {'; '.join(told)}"


def _scores(runs: Real, heading: str, names: Sequence[str], columns: Sequence[Column]) -> str:
    def cells(name: str) -> list[str]:
        made, sides = runs.of(name), runs.temperatures(name)
        tau = [fmean(side.mean for side in sides), fmean(side.spearman or 0.0 for side in sides)] if sides else []
        return [chosen_words(METHODS[VARIANTS[name].method], runs.results)[0], str(len(made)),
                *(plain(runs.mean(made, measure, band)) for _, measure, band in columns),
                *([f"{figure:.2f}".replace("-", "−") for figure in tau] or ["", ""])]  # fmt: skip

    titles = heading, "its search chose", "seeds", *(title for title, *_ in columns), "mean tau", "tau and size"
    return table(titles, [(f"`{name.removeprefix('icons ')}`", *cells(name)) for name in names])


def _by_class(runs: Real) -> str:
    if not (sides := runs.temperatures("fashion isogclr")):
        return "not run yet"
    means = [fmean(of_class) for of_class in zip(*(side.class_means for side in sides), strict=True)]
    return table(("pictures", *map(str, sides[0].sizes)), [("tau", *(f"{mean:.3f}" for mean in means))])
