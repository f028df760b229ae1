"""`thermopile fork`: a new run that goes on from a checkpoint of another, with one thing changed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..storage.place import Place, Places
from ..trainer.config import data_at
from ..trainer.config.layers import Layers, apply_overrides
from .arguments import ALLOW, ANY_PLACE, RUN_DATA, TARS
from .printing import plain_text
from .progress import working

if TYPE_CHECKING:
    from ..trainer.run.fork import Fork

_log = logging.getLogger(__name__)


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile fork runs/a --out runs/b --set epochs=30\n"
    "  thermopile fork runs/a@step-4000 --out runs/b --set optimizer.cooldown=0.5\n"
    "  thermopile fork runs/a@step-0 --out runs/b --weights weights.parquet\n"
    "  thermopile fork runs/a --dry-run --set optimizer.lr=1e-4"
)
@click.argument("source", metavar="RUN[@step-N]")
@click.option("--out", type=ANY_PLACE, help="The new run: a directory, or s3://BUCKET/PATH.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting. Repeatable.")
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Weigh each sample's loss by this Parquet file's columns sample_id and weight.",
)
@RUN_DATA
@TARS
@click.option("--dry-run", is_flag=True, help="Say what a fork at each kept checkpoint would be; write nothing.")
@ALLOW
def fork(
    source: str,
    out: Place | None,
    overrides: tuple[str, ...],
    weights: Path | None,
    data: Places | None,
    tars: Place | None,
    dry_run: bool,
    allow_code: bool,
) -> None:
    """Make OUT a run that goes on from a checkpoint of RUN, by default the latest, with the settings of then and these.

    Without changes it goes on as RUN did, bit for bit. Weights, optimiser and the samples' state are linked, not
    copied, where they can be. RUN may train meanwhile, and is not changed. @step-0 begins again.
    """
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out': the new run's directory")
    from ..trainer.checkpoints.checkpoint_files import LATEST
    from ..trainer.encoders.initial_weights import parts_of
    from ..trainer.run.fork import make_fork, plan_fork, plans
    from ..trainer.run_directory import RunDirectory

    given = _given(overrides, weights, data, tars)
    path, step = parts_of(source)
    origin = RunDirectory(path)
    if dry_run:
        for plan in (
            [plan_fork(origin, step, given, allow_code=allow_code)]
            if step
            else plans(origin, given, allow_code=allow_code)
        ):
            _say(plan)
        return
    assert out is not None
    while True:
        plan = plan_fork(origin, step or LATEST, given, allow_code=allow_code)
        with working(f"forking {origin.path} at step {plan.step:,} …"):
            if make_fork(plan, RunDirectory(out)):
                break
        _log.warning("%s removed step-%d while it was forked; starting over", origin.path, plan.step)
    _say(plan)
    click.echo(plain_text(f"{out}: forked; next: `thermopile train --out {out} --resume`", most=1000))


def _given(overrides: tuple[str, ...], weights: Path | None, data: Places | None, tars: Place | None) -> Layers:
    from ..trainer.run.fork import TYPED

    tree: dict[str, Any] = {}
    apply_overrides(tree, overrides)
    layers = Layers()
    layers.add(tree, TYPED)
    if data:
        layers.add({"data": data_at(data)}, TYPED)
    for name, file in (("weights", weights), ("tars", tars)):
        if file is not None:
            layers.add({"data": {name: str(file.resolve())}}, TYPED)
    return layers


def _say(plan: Fork) -> None:
    """Print what a fork is, and what it changes."""
    lines = [f"step {plan.step:,} of {plan.total_steps:,}, {plan.total_steps - plan.step:,} to make"]
    lines += [change.arrow for change in plan.changes] or ["nothing changed"]
    before, after = plan.rates
    if before != after:
        lines.append(f"the learning rate of the next step is {after:.4g} instead of {before:.4g}")
    lines += [f"not taken over: a later change of the run, {change.arrow}" for change in plan.changed_since]
    for line in lines:
        click.echo(plain_text(f"{plan.origin.path}@step-{plan.step}: {line}", most=1000))
