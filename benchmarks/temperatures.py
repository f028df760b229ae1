"""How iSogCLR's temperatures move: step size eta, trust region tau_step, and the papers' values, on the glyphs.

Every cell is trained with three seeds on glyphs drawn with a seed of their own, and scored on test glyphs of that seed:
the demo's are left alone. Finished runs are lines of FOLDER/results.jsonl, so a later call makes only what is missing.

Examples:
  python -m benchmarks.temperatures temperatures
  python -m benchmarks.temperatures temperatures --seeds 1 --epochs 2
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import numpy as np

from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.state_store import StateReader
from thermopile.tools.bench.machine import describe_machine, words_of
from thermopile.tools.cli import main as thermopile
from thermopile.tools.inspection.run import read_run
from thermopile.tools.inspection.survey import survey
from thermopile.trainer.preemption import EXIT_CODE
from thermopile.trainer.run_directory import RunDirectory

GLYPHS_SEED = 1
STEPS_PER_EPOCH = 42

STEP_SIZES, TRUST_REGIONS = (0.02, 0.005, 0.002), (None, 0.1, 0.3)
CELLS: list[dict[str, float]] = [
    {"eta": eta} | ({} if step is None else {"tau_step": step}) for eta, step in product(STEP_SIZES, TRUST_REGIONS)
]
CELLS += [{"tau_init": 0.01, "eta": 0.01, "rho": 6.0} | more for more in ({}, {"tau_step": 0.1})]
"""Settings of the objective; the others are those of `--preset glyphs`, but for tau_step, which is unset where it is
not named. The last two have the papers' values."""

COLUMNS = {
    "stuck": "stuck", "at_tau_min": "at tau_min", "silent": "silent", "spearman": "Spearman", "r_at_1": "R@1 i→t",
    "r_at_1_back": "R@1 t→i", "knn": "k-NN",
}  # fmt: skip


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--epochs", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--only", multiple=True, help="A cell as it is printed, such as 'eta 0.005'; repeatable. Default: all.")
def main(folder: Path, seeds: int, epochs: int, only: tuple[str, ...]) -> None:
    folder.mkdir(exist_ok=True)
    cells = [cell for cell in CELLS if not only or words(cell) in only]
    train, test = (_glyphs(folder, test=test) for test in (False, True))
    # Seed by seed, so that a table exists early.
    for seed, cell in product(range(seeds), cells):
        if _found(folder, cell, seed, epochs) is None:
            click.echo(f"{words(cell)}, seed {seed}", err=True)
            if not _train(folder, train, test, cell, seed, epochs):
                return
            line = {
                "cell": cell,
                "seed": seed,
                "epochs": epochs,
                **_scores(_run(folder, cell, seed, epochs)),
            }
            with (folder / "results.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
    click.echo(words_of(describe_machine("torch")) + "\n")
    click.echo(f"| {seeds} seeds, {epochs} epochs | " + " | ".join(COLUMNS.values()) + " |")
    click.echo("|---" * (1 + len(COLUMNS)) + "|")
    for cell in cells:
        lines = [_found(folder, cell, seed, epochs) or {} for seed in range(seeds)]
        click.echo(
            f"| {words(cell)} | " + " | ".join(_shown(name, [line[name] for line in lines]) for name in COLUMNS) + " |"
        )


def words(cell: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in cell.items())


def _shown(name: str, of_seeds: list[float]) -> str:
    """The mean; of Spearman's correlations, the smallest of all seeds and sides."""
    return f"{min(of_seeds):.2f}" if name == "spearman" else f"{fmean(of_seeds):.1%}"


def _glyphs(folder: Path, *, test: bool) -> Dataset:
    path = folder / ("test" if test else "train")
    if not path.exists():
        convert(GlyphSource(GLYPHS_SEED, test=test), path, ConvertSettings(), workers=1)
    return Dataset(path)


def _run(folder: Path, cell: dict[str, float], seed: int, epochs: int) -> RunDirectory:
    return RunDirectory(folder / f"{words(cell).replace(', ', '-').replace(' ', '-')}-epochs-{epochs}-seed-{seed}")


def _found(folder: Path, cell: dict[str, float], seed: int, epochs: int) -> dict[str, Any] | None:
    file = folder / "results.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    wanted = (cell, seed, epochs)
    return next((line for line in lines if (line["cell"], line["seed"], line["epochs"]) == wanted), None)


def _train(folder: Path, train: Dataset, test: Dataset, cell: dict[str, float], seed: int, epochs: int) -> bool:
    settings = {f"objective.{key}": value for key, value in ({"tau_step": "none"} | cell).items()}
    settings |= {"seed": seed, "epochs": epochs, "checkpoint.every_steps": 0, "log_every": 100}
    settings |= {
        "evaluation.test": test.path,
        "evaluation.every_steps": STEPS_PER_EPOCH * epochs,
    }  # after the last step
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    out = _run(folder, cell, seed, epochs).path
    given = ["train", "--preset", "glyphs", "--data", str(train.path), "--out", str(out), "--resume", *words]
    return bool(thermopile(given, standalone_mode=False) != EXIT_CODE)


def _scores(run: RunDirectory) -> dict[str, float]:
    """Shares of samples, mean over both sides; the smallest of both sides' correlations; shares of test samples."""
    *lines, last = map(json.loads, run.metrics_file.read_text().splitlines())
    scores, measured, floor = last["evaluation"], survey(read_run(run)), run.config().objective.settings["tau_min"]
    assert measured is not None
    state, stuck, at_floor = StateReader.open(run.state), [], []
    for side in ("image", "text"):
        low = state.column(f"{side}/tau") <= 1.01 * floor
        at_floor.append(low.mean())
        stuck.append((low & (state.column(f"{side}/log_s") > 0)).mean())
    silent = [line[f"{side}/share_silent"] for line in lines[-STEPS_PER_EPOCH:] for side in ("image", "text")]
    spearman = measured.groups[0].correlation
    return {
        "stuck": float(np.mean(stuck)), "at_tau_min": float(np.mean(at_floor)), "silent": fmean(silent),
        "spearman": min(float(spearman[side].spearman) for side in ("image", "text")),
        "r_at_1": scores["image_to_text"]["1"]["all"], "r_at_1_back": scores["text_to_image"]["1"]["all"],
        "knn": scores["knn"]["10"]["all"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
