"""The page: the papers' claims beside what was seen, the settings that the search chose, and the scores.

Its words are in page.md; here are its figures and tables. It is made of the results alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from thermopile.files import write_atomically

from reproduction import claims
from reproduction import plan as plans
from reproduction.comparison import ALL, TEST_SAMPLES, Comparison, Estimate
from reproduction.figures import draw
from reproduction.plan import BASELINES, EPOCHS, METHODS, MODES, RATE, SEEDS, Data, Length, Method, Mode
from reproduction.results import KNN, PROBE, RETRIEVAL, ZERO_SHOT, Measure, Result, Results
from reproduction.schedule import (
    BALANCED,
    BATCHES,
    CONSTANT_GAMMA,
    OPTIMIZERS,
    OTHER_TAU_INIT,
    SEARCHED_AGAIN,
    SEARCHED_AT,
    SWEPT,
    WITH_COSINE,
    missing,
    optimized,
    parts,
    runs_of,
)  # fmt: skip
from reproduction.search import chosen, trials

WORDS = Path(__file__).with_name("page.md")
COMMAND = "make reproduce FULL=1"
CORES = 2
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
    values = {
        "SHOWS": claims.SHOWS,
        "REVERSED": claims.REVERSED,
        "NOISE": claims.NOISE,
        "NOT_CLEAR": claims.NOT_CLEAR,
        "LONG_TAIL": claims.LONG_TAIL,
        "remembered": f"{100 * claims.REMEMBERED:.0f} %",
        **_of_plan(),
        **_of_results(results),
        "claims": "\n\n".join(_claims(group, runs, pictures) for group in claims.GROUPS),
        "methods_tables": "\n\n".join(_methods_table(mode, runs) for mode in MODES),
        "sweep": _sweep_table(runs),
        "others": _others_table(runs),
    }
    return "\n\n".join(_wrapped(block.format_map(values)) for block in WORDS.read_text("utf-8").split("\n\n"))


def _of_plan() -> dict[str, Any]:
    rate_of_images = plans.METHOD["unimodal", "isogclr"].fixed["objective.eta"]
    return {
        "command": COMMAND,
        "epochs": f"{EPOCHS['unimodal']} epochs on images, {EPOCHS['bimodal']} on pairs",
        "images_epochs": EPOCHS["unimodal"],
        "images_recipe": plans.RECIPES["unimodal"],
        "pairs_recipe": plans.RECIPES["bimodal"],
        "taus": _listed(plans.TAUS),
        "rates": _listed(plans.RATES),
        "middle_rate": plans.MIDDLE_RATE,
        "eta_images": rate_of_images,
        "test_samples": TEST_SAMPLES[ALL],
        "seeds": _listed(plans.SEEDS),
        "batch": plans.BATCH,
        "again": ", ".join(f"`{name}`" for name in SEARCHED_AGAIN),
        "smallest": min(BATCHES),
        "largest": max(BATCHES),
        "smallest_for": next(batch for batch, at in SEARCHED_AT.items() if at != batch),
    }


def _of_results(results: Results) -> dict[str, Any]:
    machines = {f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}, {m['gpu'] or 'no GPU'}"
                for m in (result.machine for result in results)}  # fmt: skip
    planned = parts(full=True)
    left = {part: (len(missing([part], results)), len(runs_of([part], results))) for part in planned}
    not_run = "; ".join(f"{part.name} ({count} of {of})" for part, (count, of) in left.items() if count)
    total, missed = len(runs_of(planned, results)), len(missing(planned, results))
    seconds = sum(part.seconds * count for part, (count, _) in left.items()) + sum(r.seconds for r in results)
    return {
        "hours": f"{seconds / CORES / 3600:.0f}",
        "status": f"{total - missed} of {total} runs are made" + (f"; not yet: {not_run}." if missed else "."),
        "machines": "; ".join(sorted(machines)),
        "versions": _listed(sorted({result.version for result in results})),
        "samples": plans.SAMPLES,
    }


def _claims(group: claims.Group, runs: Comparison, pictures: dict[str, str]) -> str:
    picture = f"![{group.name}]({pictures[group.picture]})\n\n" if group.picture in pictures else ""
    rows = [(claim.claim, f"{claim.source}: {claim.reported}", found.seen, f"**{found.verdict}**")
            for claim in group.claims for found in [claim.judge(runs)]]  # fmt: skip
    return f"### {group.name}\n\n{picture}" + _table(("claim", "reported", "seen here", "verdict"), rows)


def _methods_table(mode: Mode, runs: Comparison) -> str:
    measures = SCORES[mode]
    heading = (plans.WORDS[mode], "chosen", "trials", *(m.label for m in measures), "tail")
    floors = [(name.replace("_", " "), "", runs.baseline(mode, name)) for name in BASELINES]
    rows = [(label, words, "", *_scores([result] if result else [], measures, runs, single=True))
            for label, words, result in floors]  # fmt: skip
    for method in METHODS:
        if method.mode == mode:
            found = runs.seeds(mode, method.label)
            rows.append(
                (
                    f"`{method.label}`",
                    _chosen(method, runs.results),
                    str(len(trials(method, runs.results))),
                    *_scores(found, measures, runs),
                )
            )
    return _table(heading, rows)


def _chosen(method: Method, results: Results) -> str:
    """The searched settings, by their short names."""
    if (settings := chosen(method, results)) is None:
        return "not searched yet"
    keys = [*(key for key in method.grid if key != RATE), RATE]
    return ", ".join(f"{key.rsplit('.', 1)[-1]} {plans.word(settings[key])}" for key in keys)


def _scores(
    found: Sequence[Result], measures: Sequence[Measure], runs: Comparison, *, single: bool = False
) -> list[str]:
    """Means; the last measure's with its error, also in the tail. single: without any error."""
    cells = [runs.mean(found, measure) for measure in measures]
    plain = [_plain(cell) for cell in cells]
    tail = runs.mean(found, measures[-1], "tail")
    if single:
        return [*plain, _plain(tail)]
    return [*plain[:-1], _with_error(cells[-1]), _with_error(tail)]


def _with_error(estimate: Estimate | None) -> str:
    return f"{estimate.points:.1f} ± {estimate.noise:.1f}" if estimate else "–"


def _sweep_table(runs: Comparison) -> str:
    def cell(name: str, batch: int) -> str:
        """At BATCH both lengths are the same run."""
        lengths: tuple[Length, ...] = ("epochs",) if batch == plans.BATCH else ("epochs", "steps")
        return " / ".join(_plain(runs.mean(runs.swept(name, batch, length))) for length in lengths)

    found = [mean for name in SWEPT for batch in BATCHES if (mean := runs.mean(runs.swept(name, batch)))]
    noise = f" (all ± {max(mean.noise for mean in found):.1f})" if found else ""
    rows = [(name.replace("_", " "), *[_floor(runs, "unimodal", name)] * len(BATCHES)) for name in BASELINES]
    rows += [(f"`{name}`", *(cell(name, batch) for batch in BATCHES)) for name in SWEPT]
    return _table((f"batch size{noise}", *map(str, BATCHES)), rows)


def _floor(runs: Comparison, mode: Mode, name: str, data: Data = "long-tailed") -> str:
    """The score of what nothing has trained."""
    found = runs.baseline(mode, name, data)
    return _plain(runs.mean([found] if found else []))


class _Other(NamedTuple):
    """Runs that are compared beside the methods' own."""

    what: str
    mode: Mode
    found: dict[str, list[Result]]
    """What is compared -> its runs."""
    data: Data = "long-tailed"


def _others_table(runs: Comparison) -> str:
    rows = []
    for other in _others(runs):
        floors = (_floor(runs, other.mode, name, other.data) for name in BASELINES)
        scores = (f"{words} {_with_error(runs.mean(found))}" for words, found in other.found.items())
        rows.append((other.what, *floors, "; ".join(scores)))
    return _table(("", "raw pixels", "untrained", "scores"), rows)


def _others(runs: Comparison) -> Iterator[_Other]:
    balanced = {f"`{name}`": runs.best("unimodal", name, data="balanced") for name in BALANCED}
    yield _Other("balanced classes, images", "unimodal", balanced, "balanced")
    without = runs.seeds("unimodal", "auc_cl", changed={"objective.alpha": 0.0}, seeds=SEEDS[:1])
    usual = runs.seeds("unimodal", "auc_cl")
    yield _Other("alpha of `auc_cl`", "unimodal", {"chosen": usual, "0, one seed:": without})
    for mode, other in OTHER_TAU_INIT.items():
        found = {}
        for first in (plans.METHOD[mode, "isogclr"].fixed["objective.tau_init"], other):
            made = runs.seeds(mode, "isogclr", changed={"objective.tau_init": first}, seeds=SEEDS[:1])
            last = ", ".join(f"{side.mean:.3f}" for result in made for side in result.temperatures.values())
            found[f"{first:g} (at the end {last or '–'})"] = made
        yield _Other(f"tau_init of `isogclr`, {plans.WORDS[mode]}, one seed", mode, found)
    for label in WITH_COSINE:
        constant, cosine = (runs.seeds("bimodal", label, changed=changed) for changed in (CONSTANT_GAMMA, None))
        yield _Other(f"gamma of `{label}`", "bimodal", {"constant": constant, "cosine": cosine})
    known = {name: optimized(name, 0, runs.results) for name in OPTIMIZERS}
    rates = {name: plans.word(run.settings[RATE]) if run else "–" for name, run in known.items()}
    tried = {f"{name} (lr {rates[name]})": runs.optimized(name) for name in OPTIMIZERS}
    yield _Other("optimiser of `fastclip_v3`", "bimodal", tried)


def _plain(estimate: Estimate | None) -> str:
    return f"{estimate.points:.1f}" if estimate else "–"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(plans.word(value) for value in values)


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
