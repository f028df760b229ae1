"""`thermopile status`: the state of a run in a dozen lines."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ..storage.place import Place
from ..trainer.metrics.step_report import percent
from .arguments import RUN
from .printing import plain_text
from .progress import duration, in_units

if TYPE_CHECKING:
    from ..trainer.run.run_status import RunStatus, StepsStatus

_BARS = "▁▂▃▄▅▆▇█"
_MAX_LISTED = 6
"""Newest checkpoints and snapshots to list."""
_MAX_SCORES = 8
"""Scores shown per evaluation."""


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile status runs/glyphs\n"
    "  thermopile status runs/glyphs --json\n"
    "  watch -n 10 thermopile status runs/glyphs"
)
@RUN
@click.option("--json", "as_json", is_flag=True, help="Print the status as one JSON object.")
def status(run: Place, as_json: bool) -> None:
    """Show the status of RUN: whether it trains, its progress, loss, time per part of a step, and checkpoints.

    Works while the run trains and changes nothing. Means are over the last 100 steps.
    """
    from ..trainer.run.run_status import read_status
    from ..trainer.run_directory import RunDirectory

    found = read_status(RunDirectory(run))
    if as_json:
        click.echo(json.dumps(asdict(found), allow_nan=False, default=lambda lineage: lineage.model_dump()))
        return
    for title, words in _lines(found):
        click.echo(f"{title:<15}{words}")


def _lines(run: RunStatus) -> Iterator[tuple[str, str]]:
    yield "run", plain_text(run.run, most=1000)
    for place, line in enumerate(run.lineage.lines() if run.lineage else []):
        yield "" if place else "origin", plain_text(line, most=1000)
    yield "state", _state(run)
    if run.steps:
        yield from _steps_lines(run, run.steps)
    if run.checkpoints:
        last, kept = run.checkpoints[-1], _listed([f"{checkpoint.step:,}" for checkpoint in run.checkpoints])
        size = in_units(last.bytes)
        yield "checkpoints", f"step {last.step:,}, {duration(last.age_seconds)} ago, {size}; kept: {kept}"
    else:
        yield "checkpoints", "none yet"
    if run.sample_state:
        state = run.sample_state
        tags = [tag for tag in state.snapshots if tag != "step-0"]
        selected = f" selected of {state.dataset_samples:,}" if state.kept < state.dataset_samples else ""
        about = "about " * state.is_estimated
        yield "samples", f"{state.kept:,}{selected}, visited {about}{percent(state.coverage)} at the last snapshot"
        if state.parts:
            named = [f"{name} {samples:,}" for name, samples in state.parts.items()]
            yield "parts", plain_text(", ".join(named), most=1000)
        yield "snapshots", _listed(tags) if tags else "only the initial values"
    for evaluation in run.evaluations:
        # Only scores over all samples; metrics.jsonl and --json have the bands.
        named = evaluation["evaluation"].items()
        scores = [f"{name.removesuffix('/all')} {score:.4g}" for name, score in named if name.endswith("/all")]
        more = f"  and {len(scores) - _MAX_SCORES} more" if len(scores) > _MAX_SCORES else ""
        of = " of averaged weights" if evaluation.get("weights") == "averaged" else ""
        words = f"step {evaluation['step']:,}{of}: {', '.join(scores[:_MAX_SCORES])}{more}"
        yield "evaluation", plain_text(words, 1000)
    for title, texts in (("warning", run.warnings), ("note", run.notes)):
        for text in texts:
            yield title, plain_text(text, most=1000)


def _state(run: RunStatus) -> str:
    written = f"last line {duration(run.steps.age_seconds)} ago" if run.steps else "no line yet"
    writer = plain_text(run.writer or "")
    if run.state == "running":
        return f"running as {writer}, {written}"
    if run.state == "silent":
        quiet = f"been quiet for {duration(run.steps.age_seconds)}" if run.steps else "not written a line"
        return f"silent: {writer} holds the run lock but has {quiet}; it may be hung"
    if run.state == "stopped" and run.writer:
        is_certain = run.writer.endswith(f" on {socket.gethostname()}")
        unless = "" if is_certain else ", or trains on a machine that does not share its lock"
        return f"stopped: {writer} was killed{unless} ({written})"
    return run.state if run.state == "never started" else f"{run.state}, {written}"


def _steps_lines(run: RunStatus, steps: StepsStatus) -> Iterator[tuple[str, str]]:
    total = f" of {run.total_steps:,} ({percent(steps.step / run.total_steps, 1)})" if run.total_steps else ""
    left = f", {duration(run.seconds_left)} left" if run.seconds_left is not None else ""
    asked = ", ended by --steps" if run.state == "finished" and steps.epoch + 1 < run.epochs else ""
    yield "step", f"{steps.step:,}{total}{asked}, epoch {steps.epoch + 1:,} of {run.epochs:,}{left}"
    now = "none: the step was skipped" if steps.loss is None else f"{steps.loss:.4f}"
    mean = "" if steps.loss_mean is None else f"  mean {steps.loss_mean:.4f}"
    yield "loss", f"{now}{mean}  {_sparkline(steps.loss_curve)}"
    if steps.tau_mean is not None:
        yield "tau", f"{steps.tau_mean:.4f}"
    if steps.learning_rate is not None:
        yield "learning rate", f"{steps.learning_rate:.3g}"
    if run.samples_per_second is not None:
        yield "speed", f"{run.samples_per_second:,.0f} samples/s"
    if steps.split:
        yield "time", "  ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in steps.split.items())
    if steps.collapse:
        yield "collapsed", steps.collapse
    for hint in steps.hints:
        yield "hint", hint
    if steps.skipped:
        yield "skipped", f"{steps.skipped:,} of the last 100 steps"
    if steps.refused_rows:
        yield "refused", f"{steps.refused_rows:,} rows of state that were not finite"


def _listed(names: list[str]) -> str:
    earlier = f"{len(names) - _MAX_LISTED:,} earlier, " if len(names) > _MAX_LISTED else ""
    return earlier + ", ".join(names[-_MAX_LISTED:])


def _sparkline(values: list[float]) -> str:
    low, high = min(values, default=0.0), max(values, default=0.0)
    height = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * height)] for value in values)
