"""How iSogCLR's temperatures move: step size eta, trust region tau_step, and the papers' values, on the glyphs.

Every row is of three seeds, trained on glyphs drawn with a seed of their own and scored on test glyphs of that seed:
the demo's are left alone. Datasets and runs stay in FOLDER, so a later call makes only what is missing.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from statistics import fmean

import click

from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.state_store import StateReader
from thermopile.tools.bench.machine import describe_machine, words_of
from thermopile.tools.inspection.reading.opening import read_run
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.trainer.run_directory import RunDirectory

from .glyph_runs import converted, trained
from .markdown import table

GLYPHS_SEED, SEEDS, EPOCHS, STEPS_PER_EPOCH = 1, 3, 20, 42

CELLS: list[dict[str, float]] = [
    {"eta": eta} | ({} if step is None else {"tau_step": step})
    for eta, step in product((0.02, 0.005, 0.002), (None, 0.1, 0.3))
]
CELLS += [{"tau_init": 0.01, "eta": 0.01, "rho": 6.0} | more for more in ({}, {"tau_step": 0.1})]
"""Settings of the objective; the others are those of `--preset glyphs`, but for tau_step, which is unset where it is
not named. The last two have the papers' values."""


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    data, test = (converted(GlyphSource(GLYPHS_SEED, test=name == "test"), folder / name) for name in ("train", "test"))
    rows = []
    for cell in CELLS:
        words = ", ".join(f"{key} {value}" for key, value in cell.items())
        settings: dict[str, object] = {"objective.tau_step": "none"} | {f"objective.{key}": cell[key] for key in cell}
        settings |= {"epochs": EPOCHS, "checkpoint.every_steps": 0, "log_every": 100, "evaluation.test": test}
        settings |= {"evaluation.every_steps": STEPS_PER_EPOCH * EPOCHS}  # after the last step
        name = words.replace(", ", "-").replace(" ", "-")
        runs = [trained(data, folder / f"{name}-{seed}", settings | {"seed": seed}) for seed in range(SEEDS)]
        scores = [_scores(RunDirectory(run)) for run in runs]
        rows.append((words, *(_shown(name, [of_run[name] for of_run in scores]) for name in scores[0])))
    click.echo(words_of(describe_machine("torch")) + "\n")
    click.echo(table((f"{SEEDS} seeds, {EPOCHS} epochs", *scores[0]), rows))


def _shown(name: str, of_seeds: list[float]) -> str:
    """The mean; of Spearman's correlations, the smallest of all seeds and sides."""
    return f"{min(of_seeds):.2f}" if name == "Spearman" else f"{fmean(of_seeds):.1%}"


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


if __name__ == "__main__":
    main()
