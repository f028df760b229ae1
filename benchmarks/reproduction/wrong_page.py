"""The page on wrong captions: a figure, what was scored, and what of it the learned temperature explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes

from thermopile.storage.files import write_atomically

from ..markdown import table
from .comparison import Comparison, Estimate
from .figures import COLOURS, MUTED, figure
from .page import chosen_words, wrapped
from .plan import Method, On, Run, Settings
from .results import Result, Results
from .schedule import missing, runs_of
from .search import search
from .wrong import (
    CLIP,
    CLIP_DOUBT,
    FEW_SEEDS,
    ISOGCLR,
    ISOGCLR_DOUBT,
    REAL,
    REAL_SEEDS,
    REAL_SHARES,
    SEARCHED_UNDER,
    SHARES,
    SOGCLR,
    SOGCLR_DOUBT,
    compared,
    curated,
    divided,
    parts,
)

WORDS = Path(__file__).with_name("wrong_page.md")
LINES = {"CLIP": CLIP, "CLIP with doubt": CLIP_DOUBT, "iSogCLR": ISOGCLR, "iSogCLR with doubt": ISOGCLR_DOUBT}
"""Name on the page -> a method that is compared at every share."""
ORACLE = "iSogCLR on the right pairs alone"


class Found:
    """The finished runs."""

    def __init__(self, results: Results) -> None:
        self.results, self.runs = results, Comparison(results)

    def at(self, method: Method, share: int, *, on: On = "glyphs", right: bool = False, seeds: int = 0) -> list[Result]:
        """A method's runs at a share of wrong captions; none before all are made. Of no wrong ones all are right."""
        count = seeds or (SHARES[share] if on == "glyphs" else REAL_SEEDS)
        return self.of(count, lambda seed: compared(method._replace(on=on), self.results, share, seed,
                                                    right=right and share > 0))  # fmt: skip

    def of(self, seeds: int, run: Callable[[int], Run | None]) -> list[Result]:
        return self.runs.all(map(run, range(seeds)))


def write_page(results: Results, path: Path) -> Path:
    """Write the page, Markdown, and its picture beside it; return where the page is."""
    found, picture = Found(results), path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    if png := figure((6.4, 3.6), [lambda axes: _shares(axes, found)]):
        write_atomically(picture, png)
    write_atomically(path, to_markdown(found, picture.name).encode())
    return path


def to_markdown(found: Found, picture: str) -> str:
    """The page's text."""
    clean = found.at(ISOGCLR_DOUBT, 0), found.at(ISOGCLR, 0)
    values = {
        "picture": picture,
        "glyphs_table": _glyphs(found),
        "real_table": _real(found),
        "rivals_table": _rivals(found),
        "temperatures_table": _temperatures(found.results),
        "cost": _signed(found.runs.gap(*clean)),
        "cost_in_tail": _signed(found.runs.gap(*clean, band="tail")),
        "status": _status(found.results),
        "commit": (found.results.commit or "none")[:12],
        "machines": "; ".join(sorted({f"{m['cpu']}, torch {m['torch']}" for m in (r.machine for r in found.results)})),
        "seeds": SHARES[SEARCHED_UNDER],
        "few_seeds": FEW_SEEDS,
    }
    return "\n\n".join(wrapped(block.format_map(values)) for block in WORDS.read_text("utf-8").split("\n\n"))


def _status(results: Results) -> str:
    total, left = len(runs_of(parts(), results)), len(missing(parts(), results))
    return f"{total} runs" if not left else f"{total - left} of {total} runs so far"


def _shares(axes: Axes, found: Found) -> bool:
    """Draw every method's R@1 against the share of wrong captions."""
    lines = {name: {share: found.at(method, share) for share in SHARES} for name, method in LINES.items()}
    lines[ORACLE] = {share: found.at(ISOGCLR, share, right=True) for share in SHARES}
    colours = (COLOURS[1], COLOURS[1], COLOURS[0], COLOURS[0], MUTED)
    for (name, of_shares), colour in zip(lines.items(), colours, strict=True):
        known = {share: mean for share, runs in of_shares.items() if (mean := found.runs.mean(runs))}
        style = ":" if name == ORACLE else "-" if "doubt" in name else "--"
        axes.errorbar([*known], [each.points for each in known.values()], [each.noise for each in known.values()],
                      marker="o", linestyle=style, color=colour, label=name)  # fmt: skip
    axes.set_xticks([*SHARES])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("wrong captions, %")
    axes.set_ylabel("R@1, %")
    return any(runs for of_shares in lines.values() for runs in of_shares.values())


def _glyphs(found: Found) -> str:
    rows = [(name, chosen_words(method, found.results)[0], *(_mean(found, found.at(method, share)) for share in SHARES))
            for name, method in LINES.items()]  # fmt: skip
    rows.append((ORACLE, "", *(_mean(found, found.at(ISOGCLR, share, right=True)) for share in SHARES)))
    rows.append(("iSogCLR with doubt, of that", "", *(_of_oracle(found, share) for share in SHARES)))
    return table(("glyphs", "chosen", *(f"{share} %" for share in SHARES)), rows)


def _of_oracle(found: Found, share: int) -> str:
    reached, best = (
        found.runs.mean(found.at(ISOGCLR_DOUBT, share)),
        found.runs.mean(found.at(ISOGCLR, share, right=True)),
    )
    return f"{reached.points / best.points:.0%}" if reached and best else "–"


def _real(found: Found) -> str:
    def row(on: On, word: str, share: int) -> Sequence[str]:
        clip, without, doubting = (found.at(method, share, on=on) for method in (CLIP, ISOGCLR, ISOGCLR_DOUBT))
        oracle = found.at(ISOGCLR, share, on=on, right=True) if share else []
        low, reached, high = (found.runs.mean(runs) for runs in (without, doubting, oracle))
        way = (reached.points - low.points) / (high.points - low.points) if low and reached and high else None
        return (f"{word}, {share} % wrong", *(_mean(found, runs) for runs in (clip, without, doubting, oracle)),
                _signed(found.runs.gap(doubting, without)), "–" if way is None else f"{way:.0%}")  # fmt: skip

    heading = ("real data", "CLIP", "iSogCLR", "with doubt", "on the right pairs alone", "doubt's gain", "of the way")
    words: dict[On, str] = {"drawings": "clip art", "emoji": "emoji"}
    return table(heading, [row(on, words[on], share) for on in REAL for share in REAL_SHARES])


def _rivals(found: Found) -> str:
    """What else a user would do at this share, with the time of a run."""
    share, few = SEARCHED_UNDER, FEW_SEEDS

    def of_rival(method: Method, share: int, seeds: int) -> list[Result]:
        return found.of(seeds, lambda seed: divided(method, found.results, share, seed))

    every = {
        "SogCLR": (found.at(SOGCLR, share, seeds=few), []),
        "SogCLR with doubt": (found.at(SOGCLR_DOUBT, share, seeds=few), []),
        "CLIP with doubt": (found.at(CLIP_DOUBT, share), []),
        "CLIP, divided": (of_rival(CLIP_DOUBT, share, SHARES[share]), []),
        "iSogCLR with doubt": (found.at(ISOGCLR_DOUBT, share), found.at(ISOGCLR_DOUBT, 0)),
        "iSogCLR, divided": (of_rival(ISOGCLR_DOUBT, share, SHARES[share]), of_rival(ISOGCLR_DOUBT, 0, few)),
        "iSogCLR, again on what `curate --drop-misfits` keeps": (
            found.of(few, lambda seed: curated(found.results, seed)), []
        ),
    }  # fmt: skip
    rows = [(name, _mean(found, noisy), _mean(found, clean), _seconds(noisy)) for name, (noisy, clean) in every.items()]
    return table(("glyphs", f"{share} % wrong", "0 %", "seconds a run"), rows)


def _temperatures(results: Results) -> str:
    """The best of every search, and of CLIP's with the logit scale learned and fixed."""

    def best(method: Method, chosen: Settings) -> str:
        tried = search(method, results)
        assert tried is not None
        scores = [score for settings, score in zip(tried.tried, tried.scores, strict=True)
                  if score is not None and chosen.items() <= settings.items()]  # fmt: skip
        return f"{100 * max(scores):.1f}" if scores else "–"

    rows = [
        ("CLIP, its temperature learned", best(CLIP, {"objective.learned": True})),
        ("CLIP, its temperature fixed", best(CLIP, {"objective.learned": False})),
        ("SogCLR", best(SOGCLR, {})),
        ("iSogCLR", best(ISOGCLR, {})),
    ]
    return table((f"search, {SEARCHED_UNDER} % wrong, best", "R@1"), rows)


def _mean(found: Found, runs: Sequence[Result]) -> str:
    estimate = found.runs.mean(runs)
    return f"{estimate.points:.1f} ± {estimate.noise:.1f}" if estimate else "–"


def _signed(estimate: Estimate | None) -> str:
    return f"{estimate.points:+.1f} ± {estimate.noise:.1f}".replace("-", "−") if estimate else "–"


def _seconds(runs: Sequence[Result]) -> str:
    return f"{median(result.seconds for result in runs):.0f}" if runs else "–"
