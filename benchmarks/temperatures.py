"""How iSogCLR's temperatures move: step size eta, trust region tau_step, and the papers' values, on the glyphs.

Every row is of three seeds, trained on glyphs drawn with a seed of their own and scored on test glyphs of that seed:
the demo's are left alone. Datasets and runs stay in FOLDER, so a later call makes only what is missing.

With --rho, rho is searched instead; what each of its runs reads and scores stays in benchmarks/temperatures.jsonl.
It is searched by scores and by how temperatures read, on these glyphs, as pairs and as pictures alone, and on the data
of benchmarks.kinds in KINDS (its folder) that are not all icons; five seeds, of Fashion-MNIST three, of icons two.
`glyphs-eta` is eta searched at the rho that was found: `moves` is by how much the update rule would still move the
median of temperatures.
"""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import click

from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.state_store.reader import StateReader
from thermopile.storage.local import LocalPath
from thermopile.tools.bench.machine import describe_machine, words_of
from thermopile.tools.inspection.feature_findings.by_features import by_features
from thermopile.tools.inspection.features.run_features import Asked
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.trainer.run_directory import RunDirectory

from .glyph_runs import converted, thermopile, trained
from .kinds import Run as KindsRun
from .kinds import planted_data
from .markdown import table
from .reproduction.running import commit

GLYPHS_SEED, SEEDS, EPOCHS, STEPS_PER_EPOCH = 1, 3, 20, 42
LINES = Path(__file__).with_suffix(".jsonl")

CELLS: list[dict[str, Any]] = [
    {"eta": eta} | ({} if step is None else {"tau_step": step})
    for eta, step in product((0.02, 0.005, 0.002), (None, 0.1, 0.3))
]
CELLS += [{"tau_init": 0.01, "eta": 0.01, "rho": 6.0} | more for more in ({}, {"tau_step": 0.1})]
"""Settings of the objective; the others are those of `--preset glyphs`, but for rho, which is 2, and tau_step, which is
unset, where they are not named. The last two have the papers' values."""
OWN_GAMMA: list[dict[str, Any]] = [
    cell | {"gamma": gamma} | ({"name": name} if name else {})
    for cell in ({"eta": 0.02}, {"eta": 0.005, "tau_step": 0.1})
    for name, gamma in product((None, "thermopile.benchmarks.own_gamma:OfIsogclr"), (0.8, 0.2))
]
"""Those with --own-gamma; gamma is its floor. Many samples are stuck with the first eta, none with the second."""


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--rho", "kinds", metavar="KINDS", type=click.Path(file_okay=False, path_type=Path), help="Search rho.")
@click.option("--own-gamma", is_flag=True, help="Compare gamma 0.8 and 0.2 with one of each sample's own.")
@click.option("--only", multiple=True, metavar="NAME", help="With --rho: only these data. Repeatable.")
def main(folder: Path, kinds: Path | None, own_gamma: bool, only: tuple[str, ...]) -> None:
    folder.mkdir(exist_ok=True)
    if kinds is not None:
        click.echo(searched(folder.absolute(), kinds.absolute(), only or tuple(SEARCHED)))
        return
    data, test = (converted(GlyphSource(GLYPHS_SEED, test=name == "test"), folder / name) for name in ("train", "test"))
    rows, epochs = [], EPOCHS // 2 if own_gamma else EPOCHS
    for cell in OWN_GAMMA if own_gamma else CELLS:
        words = ", ".join(f"{key} {value}" for key, value in cell.items())
        of = {"tau_step": "none", "rho": 2.0} | cell
        settings: dict[str, object] = {f"objective.{key}": value for key, value in of.items()}
        settings |= {"epochs": epochs, "checkpoint.every_steps": 0, "log_every": 100, "evaluation.test": test}
        settings |= {"evaluation.every_steps": STEPS_PER_EPOCH * epochs}  # after the last step
        name = words.replace(", ", "-").replace(" ", "-").replace(":", "-")
        runs = [trained(data, folder / f"{name}-{seed}", settings | {"seed": seed}) for seed in range(SEEDS)]
        scores = [_scores(RunDirectory(run)) for run in runs]
        rows.append((words, *(_shown(name, [of_run[name] for of_run in scores]) for name in scores[0])))
    click.echo(words_of(describe_machine("torch")) + "\n")
    click.echo(table((f"{SEEDS} seeds, {epochs} epochs", *scores[0]), rows))


def _shown(name: str, of_seeds: list[float]) -> str:
    """The mean and deviation; of Spearman's correlations, the smallest of all seeds and sides."""
    return f"{min(of_seeds):.2f}" if name == "Spearman" else f"{fmean(of_seeds):.1%} ± {100 * stdev(of_seeds):.1f}"


def _scores(run: RunDirectory) -> dict[str, float]:
    """Shares of samples, mean over both sides; the smaller of both sides' correlations; shares of test samples."""
    *lines, last = map(json.loads, run.metrics_file.read_text().splitlines())
    scores, measured, floor = last["evaluation"], survey(read_run(run)), run.config().objective.settings["tau_min"]
    assert measured is not None
    state, stuck, at_floor = StateReader.open(run.state), [], []
    for side in ("image", "text"):
        low = state.column(f"{side}/tau") <= 1.01 * floor
        at_floor.append(float(low.mean()))
        stuck.append(float((low & (state.column(f"{side}/log_s") > 0)).mean()))
    silent = [line[f"{side}/share_silent"] for line in lines[-STEPS_PER_EPOCH:] for side in ("image", "text")]
    return {
        "stuck": fmean(stuck), "at tau_min": fmean(at_floor), "silent": fmean(silent),
        "Spearman": min(found.spearman for found in measured.groups[0].correlation.values() if found is not None),
        "R@1 i→t": scores["image_to_text"]["1"]["all"], "R@1 t→i": scores["text_to_image"]["1"]["all"],
        "k-NN": scores["knn"]["10"]["all"],
    }  # fmt: skip


class Searched(NamedTuple):
    """Data on which rho is searched, or another setting."""

    seeds: int
    values: tuple[float, ...]
    settings: dict[str, object]
    preset: str = "small"
    kind: str | None = None
    """Name of the data of benchmarks.kinds; None: glyphs."""
    setting: str = "objective.rho"


OF_PAIRS, OF_PICTURES = (0.5, 1.0, 2.0, 4.0), (0.1, 0.3, 1.0, 2.0)
PICTURES: dict[str, object] = {"objective.mode": "unimodal", "objective.tau_min": 0.05, "objective.tau_init": 0.3}
SMALL_SIDE = {"data.image_size": 32, "batch_size": 256}
SEARCHED = {
    "glyphs": Searched(5, OF_PAIRS, {"epochs": EPOCHS}, "glyphs"),
    "glyphs-eta": Searched(3, (0.0025, 0.005, 0.01, 0.02), {"epochs": EPOCHS}, "glyphs", setting="objective.eta"),
    "glyph-pictures": Searched(5, OF_PICTURES, {"epochs": EPOCHS, **PICTURES}, "glyphs"),
    "openclipart": Searched(5, OF_PAIRS, {"epochs": 20, "batch_size": 256}, kind="openclipart"),
    "icons-40000": Searched(2, OF_PAIRS, {"epochs": 8, **SMALL_SIDE}, kind="icons-40000"),
    "fashion": Searched(3, OF_PICTURES, {"epochs": 8, **SMALL_SIDE, **PICTURES}, kind="fashion"),
}
"""tau_min and tau_init of pictures are those with which the paper's rho binds within these epochs."""
SHOWN = {
    "knn/10/all": "k-NN", "knn/10/tail": "its tail", "image_to_text/1/all": "R@1 i→t", "text_to_image/1/all": "R@1 t→i",
}  # fmt: skip


def searched(folder: Path, kinds: Path, names: tuple[str, ...]) -> str:
    """Train what is missing; return a table of scores by data and rho, mean ± standard error over the seeds."""
    lines = [json.loads(line) for line in LINES.read_text("utf-8").splitlines()] if LINES.exists() else []
    read: dict[str, dict[str, float]] = {line["run"]: line for line in lines}
    rows = []
    for name in names:
        of = SEARCHED[name]
        if of.kind is None:
            data, test = (
                converted(GlyphSource(GLYPHS_SEED, test=each == "test"), folder / each) for each in ("train", "test")
            )
        else:
            data = planted_data(kinds, KindsRun(of.kind, "plain", 0))
            test = data.with_name(f"{data.name}-test")
        for value in of.values:
            of_seeds = []
            for seed in range(of.seeds):
                run = f"{name}-{value:g}-{seed}"
                if run not in read:
                    settings = {**of.settings, of.setting: value, "seed": seed, "checkpoint.every_steps": 0}
                    read[run] = _read(trained(data, folder / f"rho-{run}", settings, preset=of.preset), test)
                    with LINES.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"run": run, "commit": commit(), **read[run]}) + "\n")
                of_seeds.append(read[run])
            means = (
                _with_error([each.get(key) for each in of_seeds]) for key in (*SHOWN, "Spearman", "stuck", "moves")
            )
            rows.append((name, f"{value:g}", str(of.seeds), *means))
    return table(("data", "value", "seeds", *SHOWN.values(), "Spearman, classes", "stuck", "moves"), rows)


def _read(run: Path, test: Path) -> dict[str, float]:
    """The scores of a run by the keys of SHOWN; the smaller correlation of class size and mean tau; the share stuck; by
    which share the rule would still move temperatures, the side that it moves more."""
    scores = json.loads(thermopile("eval", run, "--test", test, "--json"))["scores"]
    found = {f"{name}/{k}/{band}": value for name, of_name in scores.items() for k, of_k in of_name.items()
             if isinstance(of_k, dict) for band, value in of_k.items()}  # fmt: skip
    inspection = read_run(RunDirectory(LocalPath(run)))
    measured = survey(inspection)
    assert measured is not None
    if told := by_features(inspection, measured, run / "report", Asked(), None, lambda what, done, total: None):
        found["moves"] = max((abs(math.log(factor)) for factor in told.moves.values()), default=0.0)
    if measured.groups:
        found["Spearman"] = min(each.spearman for each in measured.groups[0].correlation.values() if each is not None)
    if measured.kinds:
        found["stuck"] = measured.kinds.counts.get("stuck", 0) / measured.samples
    return found


def _with_error(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{fmean(known):.3f} ± {stdev(known) / len(known) ** 0.5:.3f}" if len(known) > 1 else f"{known[0]:.3f}"


if __name__ == "__main__":
    main()
