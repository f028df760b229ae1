"""Making the runs of a comparison: each a run directory of `thermopile train`, with what it scored beside it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._version import __version__
from .plan import Plan, Run
from .results import Result, Results, Temperatures

if TYPE_CHECKING:
    from ...pipeline.dataset import Dataset
    from ...trainer.run_directory import RunDirectory

SCORES = "scores.json"
PROMPT = "the character {lower}"
"""For zero-shot: how the glyphs' captions begin."""

Command = Callable[[list[str]], bool]
"""Does what `thermopile` does with these arguments; False where a signal stopped it."""


class Sets(NamedTuple):
    """What the runs learn from, and what they are scored on."""

    train: Dataset
    test: Dataset


def make_runs(plan: Plan, sets: Sets, folder: Path, command: Command, tell: Callable[[str], None]) -> Results | None:
    """Train and score every run of the plan that `folder` does not hold yet; None where a signal stopped one.

    A run that was stopped goes on where it was. tell is called with lines about what is being done.
    Raises RunError where a run in `folder` was made with other settings, and what training and evaluation raise.
    """
    runs = plan.runs()
    done = {run.name: result for run in runs if (result := _read(run, sets, folder)) is not None}
    began = time.monotonic()
    for number, run in enumerate(runs, 1):
        if run.name in done:
            continue
        left = [each for each in runs if each.name not in done]
        tell(f"run {number} of {len(runs)}: {run.name}; {_minutes(time.monotonic() - began)} so far"
             f"{_estimate(left, list(done.values()))}")  # fmt: skip
        arguments = train_arguments(run, sets.train.path, folder)
        tell(f"thermopile {shlex.join(arguments)}")
        fresh, started = not (folder / run.name).exists(), time.monotonic()
        if not command(arguments):
            return None
        trained = time.monotonic() - started
        done[run.name] = _score(run, sets, folder, trained if fresh else None)
        _write(done[run.name], sets, folder)
    return Results([done[run.name] for run in runs])


def train_arguments(run: Run, data: Path, folder: Path) -> list[str]:
    """Those with which `thermopile` makes the run, or goes on with it."""
    arguments = ["train", "--data", str(data), "--out", str(folder / run.name), "--resume"]
    for key, value in run.settings.items():
        arguments += ["--set", f"{key}={value}"]
    return arguments


def _score(run: Run, sets: Sets, folder: Path, seconds: float | None) -> Result:
    """The last checkpoint of a finished run, scored. Nothing of it was chosen by any score."""
    from ...trainer.evaluation.evaluate import evaluate
    from ...trainer.run_directory import RunDirectory
    from ..bench.machine import describe_machine

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
    from scipy.stats import skew

    from ..inspection.run import read_run
    from ..inspection.survey import survey

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
    from ...trainer.errors import RunError

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
    from ...files import write_atomically

    kept = {key: getattr(result, key) for key in _KEPT}
    temperatures = {side: figures._asdict() for side, figures in result.temperatures.items()}
    text = json.dumps({"made_by": _made_by(result.run, sets), **kept, "temperatures": temperatures}, allow_nan=False)
    write_atomically(folder / result.run.name / SCORES, text.encode())


SECONDS_TO_SCORE = 15.0


def _estimate(left: Sequence[Run], done: Sequence[Result]) -> str:
    """In words how long the runs that are left will take, going by those of their mode, or of any; empty at first."""
    timed = [(result.run.method.mode, result.seconds) for result in done if result.seconds is not None]
    if not timed:
        return ""
    every = fmean(seconds for _, seconds in timed)
    total = 0.0
    for run in left:
        alike = [seconds for mode, seconds in timed if mode == run.method.mode]
        total += SECONDS_TO_SCORE + (fmean(alike) if alike else every)
    return f", about {_minutes(total)} to go"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min"
