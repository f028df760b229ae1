"""The page: the papers' claims beside what was seen, the settings that the search chose, and the scores.

Its words are in page.md; here are its figures and tables. It is made of the results alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from thermopile.files import write_atomically

from reproduction import claims
from reproduction import plan as plans
from reproduction.comparison import ALL, TEST_SAMPLES, Comparison, Estimate
from reproduction.figures import draw
from reproduction.plan import BASELINES, EPOCHS, METHODS, MODES, RATE, Data, Length, Method, Mode
from reproduction.results import KNN, PROBE, RETRIEVAL, ZERO_SHOT, Measure, Result, Results
from reproduction.schedule import (
    BALANCED,
    BATCHES,
    COSINE,
    FORMS,
    OPTIMIZERS,
    OTHER_TAU_INIT,
    SEARCHED_AGAIN,
    SEARCHED_AT,
    SWEPT,
    WITH_COSINE,
    optimized,
    parts,
)  # fmt: skip
from reproduction.search import chosen

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
        **vars(claims),
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
        "shared": ", ".join(f"`{key}={plans.word(value)}`" for key, value in plans.SHARED.items()),
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
    planned = {part.name: [*part.runs(results)] for part in parts(full=True)}
    missing = {name: len([run for run in runs if run is None or results.of(run) is None])
               for name, runs in planned.items()}  # fmt: skip
    not_run = "; ".join(f"{name} ({count} of {len(planned[name])})" for name, count in missing.items() if count)
    total = sum(map(len, planned.values()))
    made = total - sum(missing.values())
    seconds = sum(part.seconds * missing[part.name] for part in parts(full=True)) + sum(r.seconds for r in results)
    return {
        "hours": f"{seconds / CORES / 3600:.0f}",
        "status": f"All {total} are made." if made == total else f"{made} of {total} are made; missing: {not_run}.",
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
    heading = (plans.WORDS[mode], "chosen", *(m.label for m in measures), "tail")
    floors = [(name.replace("_", " "), "", runs.baseline(mode, name)) for name in BASELINES]
    rows = [(label, words, *_scores([result] if result else [], measures, runs, single=True))
            for label, words, result in floors]  # fmt: skip
    for method in METHODS:
        if method.mode == mode:
            found = runs.seeds(mode, method.label)
            rows.append((f"`{method.label}`", _chosen(method, runs.results), *_scores(found, measures, runs)))
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
    plain = [f"{cell.points:.1f}" if cell else "–" for cell in cells]
    tail = runs.mean(found, measures[-1], "tail")
    if single:
        return [*plain, f"{tail.points:.1f}" if tail else "–"]
    return [*plain[:-1], _with_error(cells[-1]), _with_error(tail)]


def _with_error(estimate: Estimate | None) -> str:
    return f"{estimate.points:.1f} ± {estimate.noise:.1f}" if estimate else "–"


def _sweep_table(runs: Comparison) -> str:
    rows = [(f"`{name}`", f"equal {length}", *(_with_error(runs.mean(runs.swept(name, batch, length)))
                                                for batch in BATCHES))
            for name in SWEPT for length in _LENGTHS]  # fmt: skip
    return _table(("", "", *map(str, BATCHES)), rows)


_LENGTHS: tuple[Length, ...] = ("epochs", "steps")


def _others_table(runs: Comparison) -> str:
    def row(what: str, found: Sequence[Result], beside: str = "") -> tuple[str, str, str]:
        return what, _with_error(runs.mean(found)), beside

    balanced: Data = "balanced"
    rows = [
        row(f"balanced classes: {name.replace('_', ' ')}", [floor] if floor else [])
        for name in BASELINES for floor in [runs.baseline("unimodal", name, balanced)]
    ]  # fmt: skip
    rows += [row(f"balanced classes: `{name}`", runs.best("unimodal", name, data=balanced)) for name in BALANCED]
    for label in FORMS["auc_cl"]:
        rows.append(row(f"alpha = 0: `{label}`", runs.seeds("unimodal", label, changed={"objective.alpha": 0.0})))
    for mode, other in OTHER_TAU_INIT.items():
        found = runs.seeds(mode, "isogclr", changed={"objective.tau_init": other})
        rows.append(row(f"tau_init {other:g}: `isogclr`, {plans.WORDS[mode]}", found, _last_tau(runs, mode, found)))
    for label in WITH_COSINE:
        rows.append(row(f"cosine of gamma: `{label}`", runs.seeds("bimodal", label, changed=COSINE)))
    for name in OPTIMIZERS:
        run = optimized(name, 0, runs.results)
        rate = f"lr {plans.word(run.settings[RATE])}" if run else ""
        rows.append(row(f"optimiser {name}: `fastclip_v3`", runs.optimized(name), rate))
    return _table(("", "linear probe, or R@1 on pairs", ""), rows)


def _last_tau(runs: Comparison, mode: Mode, found: Sequence[Result]) -> str:
    usual = runs.seeds(mode, "isogclr")[:1]
    if not found or not usual:
        return ""
    means = [", ".join(f"{side.mean:.3f}" for side in runs_[0].temperatures.values()) for runs_ in (found, usual)]
    first = plans.METHOD[mode, "isogclr"].fixed["objective.tau_init"]
    return f"mean tau {means[0]}; from {first:g} {means[1]}"


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
