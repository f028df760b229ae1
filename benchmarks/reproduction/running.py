"""Making the runs of a comparison: each a run directory of `thermopile train`, with what it scored beside it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
from scipy.stats import skew

from thermopile import __version__
from thermopile.files import write_atomically
from thermopile.pipeline.dataset import Dataset
from thermopile.tools.bench.machine import describe_machine
from thermopile.tools.inspection.run import read_run
from thermopile.tools.inspection.survey import survey
from thermopile.trainer.errors import RunError
from thermopile.trainer.evaluation.evaluate import evaluate
from thermopile.trainer.run_directory import RunDirectory

from reproduction.plan import Plan, Run
from reproduction.results import Result, Results, Temperatures

SCORES = "scores.json"
PROMPT = "the character {lower}"
"""For zero-shot: how the glyphs' captions begin."""

EXIT_CODE_STOPPED = 75


class Sets(NamedTuple):
    """The datasets that the runs learn from and are scored on."""

    train: Dataset
    test: Dataset


def thermopile(*words: str) -> bool:
    """Run the command line in a process of its own; return False where a signal stopped it.

    Raises CalledProcessError where it failed.
    """
    process = subprocess.Popen([sys.executable, "-m", "thermopile.tools.cli", *words])
    # A terminal's Ctrl-C reaches both processes, a signal by id this one alone; training ends with a checkpoint.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        exit_code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if exit_code not in (0, EXIT_CODE_STOPPED):
        raise subprocess.CalledProcessError(exit_code, process.args)
    return exit_code == 0


def make_runs(plan: Plan, sets: Sets, folder: Path, train: Callable[..., bool] = thermopile) -> Results | None:
    """Train and score every run of the plan that `folder` does not hold yet; None where a signal stopped one.

    A run that was stopped goes on where it was. train: does what `thermopile` does with these words.
    Raises RunError where a run in `folder` was made with other settings, and what training and evaluation raise.
    """
    done = []
    for number, run in enumerate(plan.runs(), 1):
        if (result := _read(run, sets, folder)) is None:
            click.echo(f"run {number} of {len(plan.runs())}: {run.name}", err=True)
            fresh, started = not (folder / run.name).exists(), time.monotonic()
            if not train(*train_words(run, sets.train.path, folder)):
                return None
            result = _score(run, sets, folder, time.monotonic() - started if fresh else None)
            _write(result, sets, folder)
        done.append(result)
    return Results(done)


def train_words(run: Run, data: Path, folder: Path) -> list[str]:
    """With these `thermopile` makes the run, or goes on with it."""
    settings = [word for key, value in run.settings.items() for word in ("--set", f"{key}={value}")]
    return ["train", "--data", str(data), "--out", str(folder / run.name), "--resume", *settings]


def _score(run: Run, sets: Sets, folder: Path, seconds: float | None) -> Result:
    """The last checkpoint of a finished run, scored. Nothing of it was chosen by any score."""
    directory = RunDirectory(folder / run.name)
    evaluation = evaluate(directory, sets.train, sets.test, templates=(PROMPT,))
    return Result(
        run=run,
        scores=evaluation.scores,
        classes_of_band=evaluation.classes_of_band,
        test_samples=sets.test.n,
        samples=sets.train.n,
        temperatures=_temperatures(directory),
        seconds=seconds,
        machine=describe_machine("torch", "numpy"),
    )


def _temperatures(directory: RunDirectory) -> dict[str, Temperatures]:
    if (measured := survey(read_run(directory))) is None:
        return {}
    found = {}
    for side in measured.sides:
        correlation = measured.groups[0].correlation[side.name] if measured.groups else None
        found[side.name] = Temperatures(
            mean=side.tau.mean,
            skewness=float(skew(measured.pool.tau[side.name].astype("float64"))),
            spearman=correlation.spearman if correlation else None,
            permuted=correlation.permuted if correlation else None,
        )
    return found


def _made_by(run: Run, sets: Sets) -> dict[str, Any]:
    """All that a run's scores follow from."""
    fingerprints = {"train": sets.train.index.fingerprint, "test": sets.test.index.fingerprint}
    return {"thermopile": __version__} | fingerprints | run.settings


def _read(run: Run, sets: Sets, folder: Path) -> Result | None:
    file = folder / run.name / SCORES
    if not file.is_file():
        return None
    found, wanted = json.loads(file.read_text("utf-8")), _made_by(run, sets)
    if found["made_by"] != wanted:
        changed = [key for key in wanted if found["made_by"].get(key) != wanted[key]]
        raise RunError(f"{file} was made with other settings ({', '.join(changed)}); delete {file.parent} to make "
                       "the run again, or the whole folder to make all of them")  # fmt: skip
    temperatures = {side: Temperatures(**figures) for side, figures in found["temperatures"].items()}
    return Result(run=run, **{key: found[key] for key in _KEPT}, temperatures=temperatures)


_KEPT = ("scores", "classes_of_band", "test_samples", "samples", "seconds", "machine")


def _write(result: Result, sets: Sets, folder: Path) -> None:
    kept = {key: getattr(result, key) for key in _KEPT}
    temperatures = {side: figures._asdict() for side, figures in result.temperatures.items()}
    text = json.dumps({"made_by": _made_by(result.run, sets), **kept, "temperatures": temperatures}, allow_nan=False)
    write_atomically(folder / result.run.name / SCORES, text.encode())
