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
        "others": _others_tables(runs),
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
    noise = f"± {max(mean.noise for mean in found):.1f}" if found else ""
    floors = {name: _floor(runs, "unimodal", name) for name in BASELINES}
    rows = [(name.replace("_", " "), *[cell] * len(BATCHES)) for name, cell in floors.items()]
    rows += [(f"`{name}`", *(cell(name, batch) for batch in BATCHES)) for name in SWEPT]
    return _table((f"all {noise}", *map(str, BATCHES)), rows)


def _floor(runs: Comparison, mode: Mode, name: str, data: Data = "long-tailed") -> str:
    """The score of what nothing has trained."""
    found = runs.baseline(mode, name, data)
    return _plain(runs.mean([found] if found else []))


def _others_tables(runs: Comparison) -> str:
    """Lying tables: what is compared in the heading, its scores below."""
    return "\n\n".join((_balanced_table(runs), _tau_init_table(runs), _gamma_table(runs), _optimizer_table(runs)))


def _balanced_table(runs: Comparison) -> str:
    data: Data = "balanced"
    cells = [*(_floor(runs, "unimodal", name, data) for name in BASELINES),
             *(_with_error(runs.mean(runs.best("unimodal", name, data=data))) for name in BALANCED)]  # fmt: skip
    names = [*(name.replace("_", " ") for name in BASELINES), *(f"`{name}`" for name in BALANCED)]
    return _table(("balanced classes", *names), [("linear probe", *cells)])


def _tau_init_table(runs: Comparison) -> str:
    heading, means = ["tau_init of `isogclr`"], ["mean tau at the end"]
    floors, scores = ["probe, R@1, untrained"], ["probe, R@1"]
    for mode, other in OTHER_TAU_INIT.items():
        for first in (plans.METHOD[mode, "isogclr"].fixed["objective.tau_init"], other):
            found = runs.seeds(mode, "isogclr", changed={"objective.tau_init": first})[:1]
            heading.append(f"{first:g}, {plans.WORDS[mode]}")
            means.append(", ".join(f"{side.mean:.3f}" for side in found[0].temperatures.values()) if found else "–")
            floors.append(_floor(runs, mode, "untrained"))
            scores.append(_with_error(runs.mean(found)))
    return _table(heading, [means, floors, scores])


def _gamma_table(runs: Comparison) -> str:
    rows = [(words, *(_with_error(runs.mean(runs.seeds("bimodal", label, changed=changed))) for label in WITH_COSINE))
            for words, changed in (("constant", None), ("cosine", COSINE))]  # fmt: skip
    untrained = ("untrained", *[_floor(runs, "bimodal", "untrained")] * len(WITH_COSINE))
    return _table(("gamma, R@1", *(f"`{label}`" for label in WITH_COSINE)), [untrained, *rows])


def _optimizer_table(runs: Comparison) -> str:
    known = {name: optimized(name, 0, runs.results) for name in OPTIMIZERS}
    rates = [plans.word(run.settings[RATE]) if run else "–" for run in known.values()]
    scores = [_with_error(runs.mean(runs.optimized(name))) for name in OPTIMIZERS]
    untrained = [_floor(runs, "bimodal", "untrained")] * len(OPTIMIZERS)
    rows = [("learning rate", *rates), ("R@1, untrained", *untrained), ("R@1", *scores)]
    return _table(("`fastclip_v3`", *OPTIMIZERS), rows)


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
