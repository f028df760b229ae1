"""The page: the papers' claims beside what was seen, the settings that the search chose, and the scores.

Its words are in page.md; here are its figures and tables. It is made of the results alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from thermopile.storage.files import write_atomically

from ..markdown import table
from . import claims
from . import plan as plans
from .comparison import Comparison, Estimate
from .figures import draw
from .plan import BASELINES, EPOCHS, METHOD, MODES, RATE, Method, Mode
from .results import KNN, PROBE, RETRIEVAL, ZERO_SHOT, Measure, Result, Results
from .schedule import (
    BATCHES,
    BESIDE,
    DRAWN,
    FEW_SEEDS,
    FURTHER,
    FURTHER_SEEDS,
    SEEDS,
    SWEPT,
    Part,
    compared,
    missing,
    parts,
    runs_of,
    swept,
)
from .search import search
from .sets import TEST_SETS, test_samples

WORDS = Path(__file__).with_name("page.md")
COMMAND = "make reproduce FULL=1"
SCORES: dict[Mode, tuple[Measure, ...]] = {"unimodal": (KNN, PROBE), "bimodal": (KNN, PROBE, ZERO_SHOT, RETRIEVAL)}
"""The columns of a mode's table; the last one is what verdicts are about."""


def write_page(results: Results, path: Path) -> Path:
    """Write the page, Markdown, and its pictures beside it; return where the page is."""
    runs = Comparison(results)
    pictures = {group.picture: draw(group.picture, runs) for group in claims.GROUPS}
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, png in pictures.items():
        if png is not None:
            write_atomically(path.with_name(f"{path.stem}_{name}.png"), png)
    files = {name: f"{path.stem}_{name}.png" for name, png in pictures.items() if png is not None}
    write_atomically(path, to_markdown(results, files).encode())
    return path


def to_markdown(results: Results, pictures: dict[str, str]) -> str:
    """The page's text. pictures: group's picture -> its file name."""
    runs = Comparison(results)
    found = {claim.claim: claim.judge(runs) for group in claims.GROUPS for claim in group.claims}
    values = {
        "SHOWS": claims.SHOWS,
        "REVERSED": claims.REVERSED,
        "EQUIVALENT": claims.EQUIVALENT,
        "UNDECIDED": claims.UNDECIDED,
        "NOT_CLEAR": claims.NOT_CLEAR,
        "LEVEL": claims.LEVEL,
        "LONG_TAIL": claims.LONG_TAIL,
        **_of_plan(),
        **of_results(results, parts(full=True)),
        "verdicts": _verdicts(found),
        "claims": "\n\n".join(claims_of(group, found, pictures) for group in claims.GROUPS),
        "methods_tables": "\n\n".join(_methods_table(mode, runs) for mode in MODES),
        "drawings_table": _drawings_table(runs),
        "sweep": _sweep_table(runs),
    }
    return "\n\n".join(wrapped(block.format_map(values)) for block in WORDS.read_text("utf-8").split("\n\n"))


def _of_plan() -> dict[str, Any]:
    return {
        "command": COMMAND,
        "epochs": f"{EPOCHS['unimodal']} epochs on images, {EPOCHS['bimodal']} on pairs",
        "images_recipe": plans.SHARED_OF["unimodal"]["data.recipe"],
        "pairs_recipe": plans.SHARED_OF["bimodal"]["data.recipe"],
        "test_samples": test_samples("long-tailed"),
        "test_sets": TEST_SETS,
        "of_a_set": test_samples("long-tailed") // TEST_SETS,
        "drawings_epochs": plans.EPOCHS_ON_DRAWINGS,
        "drawings_tested": test_samples("drawings"),
        "drawings_searched": test_samples("drawings-development"),
        "image_seeds": len(SEEDS["unimodal"]),
        "pair_seeds": len(SEEDS["bimodal"]),
        "further_seeds": len(FURTHER_SEEDS),
        "further": ", ".join(f"`{name}`" for name in FURTHER),
        "few_seeds": len(FEW_SEEDS),
        "beside_seeds": ", ".join(str(len(seeds)) for seeds in BESIDE.values()),
        "beside": ", ".join(f"`{name}`" for name in BESIDE),
        "trials": plans.TRIALS,
        "again": plans.TRIALS_AGAIN,
        "batch": plans.BATCH,
        "head": METHOD["unimodal", "simclr"].head,
        "samples": plans.SAMPLES,
    }


def of_results(results: Results, planned: list[Part]) -> dict[str, Any]:
    """The words about how the runs of these parts were made."""
    machines = {f"{m['cpu']}, {m['cores']} core{'s' * (m['cores'] != 1)}, torch {m['torch']}, {m['gpu'] or 'no GPU'}"
                for m in (result.machine for result in results)}  # fmt: skip
    left = {part: (len(missing([part], results)), len(runs_of([part], results))) for part in planned}
    not_run = "; ".join(f"{part.name} ({count} of {of})" for part, (count, of) in left.items() if count)
    total, missed = len(runs_of(planned, results)), len(missing(planned, results))
    seconds = sum(part.seconds * count for part, (count, _) in left.items()) + sum(r.seconds for r in results)
    return {
        "hours": f"{seconds / 3600:.0f}",
        "status": f"{total - missed} of {total} runs are made" + (f"; not yet: {not_run}." if missed else "."),
        "machines": "; ".join(sorted(machines)),
        "versions": ", ".join(sorted({result.version for result in results})),
        "commit": (results.commit or "none")[:12],
    }


def _verdicts(found: dict[str, claims.Finding]) -> str:
    """One line for each claim that the runs say something of."""
    lines = [f"- {claim}: **{each.verdict}**" for claim, each in found.items() if each.verdict != claims.NOT_TESTED]
    left = len(found) - len(lines)
    return "\n".join([*lines, *[f"- {left} claims: **{claims.NOT_TESTED}** yet"] * bool(left)])


def claims_of(group: claims.Group, found: dict[str, claims.Finding], pictures: dict[str, str]) -> str:
    picture = f"![{group.name}]({pictures[group.picture]})\n\n" if group.picture in pictures else ""
    rows = [(claim.claim, ": ".join(filter(None, (claim.source, claim.reported))), one.seen, f"**{one.verdict}**")
            for claim in group.claims for one in [found[claim.claim]]]  # fmt: skip
    return f"### {group.name}\n\n{picture}" + table(("claim", "reported", "seen here", "verdict"), rows)


def _methods_table(mode: Mode, runs: Comparison) -> str:
    measures = SCORES[mode]
    heading = (plans.WORDS[mode], "chosen", "trials", *(m.label for m in measures), "tail")
    floors = [(name.replace("_", " "), "", "", runs.baseline(mode, name, "long-tailed")) for name in BASELINES]
    rows = [(*words, *_scores([result] if result else [], measures, runs)) for *words, result in floors]
    rows += [
        (f"`{method.name}`{method.label.removeprefix(method.name)}", *chosen_words(method, runs.results),
         *_scores(runs.seeds(method), measures, runs))
        for method in compared(mode)
    ]  # fmt: skip
    return table(heading, rows)


def _drawings_table(runs: Comparison) -> str:
    floor = runs.baseline("bimodal", "untrained", "drawings")
    rows = [("untrained", "", "", plain(runs.mean([floor] if floor else [], RETRIEVAL)))]
    rows += [(f"`{method.name}`", *chosen_words(method, runs.results), plain(runs.mean(runs.seeds(method), RETRIEVAL)))
             for method in DRAWN]  # fmt: skip
    return table(("drawings", "chosen", "trials", RETRIEVAL.label), rows)


def chosen_words(method: Method, results: Results) -> tuple[str, str]:
    """The searched settings, by their short names, with those at an edge marked; and the number of trials."""
    found = search(method, results)
    if found is None or not found.is_done:
        return "not searched yet", "–"
    keys = [*(key for key in method.axes if key != RATE), RATE]
    edges = set(found.at_edge)
    words = (f"{key.rsplit('.', 1)[-1]} {plans.word(found.best[key])}{'*' * (key in edges)}" for key in keys)
    return ", ".join(words), str(len(found.tried))


def _scores(found: Sequence[Result], measures: Sequence[Measure], runs: Comparison) -> list[str]:
    """Means; what verdicts are about also in the tail."""
    return [
        *(plain(runs.mean(found, measure)) for measure in measures),
        plain(runs.mean(found, measures[-1], "tail")),
    ]


def _sweep_table(runs: Comparison) -> str:
    def cell(name: str, batch: int) -> str:
        one = runs.all([swept(name, batch, 0, runs.results)])
        return plain(runs.mean(runs.swept(name, batch) or one))

    rows = [(name.replace("_", " "), *[_floor(runs, name)] * len(BATCHES)) for name in BASELINES]
    rows += [(f"`{name}`", *(cell(name, batch) for batch in BATCHES)) for name in SWEPT]
    return table(("batch size", *map(str, BATCHES)), rows)


def _floor(runs: Comparison, name: str) -> str:
    """The score of what nothing has trained."""
    found = runs.baseline("unimodal", name, "long-tailed")
    return plain(runs.mean([found] if found else []))


def plain(estimate: Estimate | None) -> str:
    return f"{estimate.points:.1f}" if estimate else "–"


def wrapped(block: str) -> str:
    """A block of Markdown with its paragraph or its items filled; headings, tables and pictures as they are."""
    if block[0] in "#|!":
        return block
    filled = [
        fill(" ".join(item.split()), 120, subsequent_indent="  " * item.startswith("- "), break_long_words=False,
             break_on_hyphens=False)
        for item in block.replace("\n- ", "\0- ").split("\0")
    ]  # fmt: skip
    return "\n".join(filled)
