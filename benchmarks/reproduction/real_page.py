"""The page on real data: the claims' verdicts, what to choose, and the scores. Its words are in real_page.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from thermopile.storage.files import write_atomically

from ..markdown import table
from .claims import LEVEL, NOT_TESTED, SHOWS, signed, verdict
from .comparison import ALL
from .page import chosen_words, claims_of, of_results, plain, wrapped
from .real import IMAGES, RHOS, TRIALS, VARIANTS
from .real_claims import ENTRIES, GROUPS, MOST_FURTHER, Real, every_part
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


def write_page(results: Results, path: Path) -> Path:
    """Write the page, Markdown; return where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_markdown(results).encode())
    return path


def to_markdown(results: Results) -> str:
    """The page's text."""
    runs = Real(results)
    *groups, untested = GROUPS
    found = {claim.claim: claim.judge(runs) for group in groups for claim in group.claims}
    counts = Counter(each.verdict for each in found.values())
    icons, glyphs = ([name for name in VARIANTS if name.startswith(on)] for on in (("icons", "all"), "glyphs"))
    values = {
        "decided": f"Of {len(found)} claims: {', '.join(f'{count} **{name}**' for name, count in counts.most_common())}.",
        "choices": "\n".join(_choice(runs, **each) for each in ENTRIES["choice"]),
        "claims": "\n\n".join(claims_of(group, found, {}) for group in groups),
        "untested": table(
            ("claim", "of", "why not"), [(each.claim, each.source, str(each.check)) for each in untested.claims]
        ),
        "icons_table": _scores(runs, "icons", icons, ON_ICONS),
        "glyphs_table": _scores(runs, "glyphs", [name for name in glyphs if "rho" not in name], ON_GLYPHS),
        "fashion_table": _scores(runs, "Fashion-MNIST", [f"fashion {name}" for name in IMAGES], ON_IMAGES),
        "rho_table": _by_rho(runs),
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
    level = [_word(name) for name, gap in gaps.items() if verdict(gap) != SHOWS]
    below = [f"{_word(name)} ({signed(gap)})" for name, gap in gaps.items() if verdict(gap) == SHOWS]
    told = [f"not told apart: {', '.join(level)}"] * bool(level) + [f"it is above {', '.join(below)}"] * bool(below)
    return f"- **{of}**: {_word(best)}, {plain(means[best])}; {'; '.join(told)}"


def _word(name: str) -> str:
    return f"`{name.partition(' ')[2]}`"


def _scores(runs: Real, heading: str, names: Sequence[str], columns: Sequence[Column]) -> str:
    rows = [(f"`{name.removeprefix('icons ')}`", chosen_words(VARIANTS[name].method, runs.results)[0], str(len(runs.of(name))),
             *(plain(runs.mean(runs.of(name), measure, band)) for _, measure, band in columns)) for name in names]  # fmt: skip
    return table((heading, "its search chose", "seeds", *(column for column, *_ in columns)), rows)


def _by_rho(runs: Real) -> str:
    """What trained temperatures are like, over seeds and sides."""

    def cells(name: str) -> list[str]:
        sides = runs.temperatures(name)
        figures = [fmean(side.mean for side in sides), fmean(side.spearman or 0.0 for side in sides)] if sides else []
        return [
            plain(runs.mean(runs.of(name))),
            *(f"{figure:.2f}".replace("-", "−") for figure in figures or [0.0, 0.0]),
        ]

    rows = [(f"{rho:g}", *cells(f"glyphs rho {rho:g}"), *cells(f"fashion rho {rho:g}")) for rho in RHOS]
    columns = [
        f"{on}, {what}"
        for on in ("glyphs", "Fashion-MNIST")
        for what in ("score", "mean tau", "Spearman with class size")
    ]
    return table(("rho", *columns), rows)


def _by_class(runs: Real) -> str:
    sides = runs.temperatures("fashion isogclr")
    if not sides:
        return "not run yet"
    means = [fmean(of_class) for of_class in zip(*(side.class_means for side in sides), strict=True)]
    return table(("pictures", *map(str, sides[0].sizes)), [("tau", *(f"{mean:.3f}" for mean in means))])
