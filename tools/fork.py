"""`thermopile fork`: a new run that goes on from a checkpoint of another, with some settings changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..storage.place import Place, Places
from ..trainer.config import data_at
from ..trainer.config.layers import Layers, apply_overrides
from .arguments import ANY_PLACE, RUN_DATA, TARS
from .printing import plain_text


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
@click.option("--weights", type=click.Path(path_type=Path), metavar="FILE", help="As for `thermopile train`.")
@RUN_DATA
@TARS
@click.option("--dry-run", is_flag=True, help="Say what the fork would be, of every kept checkpoint; write nothing.")
def fork(
    source: str,
    out: Place | None,
    overrides: tuple[str, ...],
    weights: Path | None,
    data: Places | None,
    tars: Place | None,
    dry_run: bool,
) -> None:
    """Make OUT a run that goes on from a checkpoint of RUN, the latest by default, with its settings of then.

    Without changes it goes on as RUN did, bit for bit. Weights, optimiser and the samples' state are linked, not
    copied, where they can be. RUN may train meanwhile, and is not changed. @step-0 begins again.
    """
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out': the new run's directory")
    tree: dict[str, Any] = {}
    apply_overrides(tree, overrides)
    given = Layers()
    given.add(tree, "--set")
    if data:
        given.add({"data": data_at(data)}, "--data")
    for name, path in (("weights", weights), ("tars", tars)):
        if path is not None:
            given.add({"data": {name: str(path.resolve())}}, f"--{name}")
    from ..trainer.checkpoints.checkpoint_files import LATEST, checkpoints_in
    from ..trainer.encoders.initial_weights import parts_of
    from ..trainer.run.fork import fork_run, plan_fork
    from ..trainer.run_directory import RunDirectory

    run, step = parts_of(source)
    origin = RunDirectory(run)
    if out is not None and not dry_run:
        forks = [fork_run(origin, step or LATEST, given, RunDirectory(out))]
    else:
        steps = [step] if step else [f"step-{step}" for step in sorted({0, *checkpoints_in(origin.checkpoints)})]
        forks = [plan_fork(origin, step, given) for step in steps]
    for each in forks:
        lines = [f"{each.step:,} of {each.total_steps:,} steps are done", *(change.arrow for change in each.changes)]
        if each.rates[0] != each.rates[1]:
            lines.append(f"the learning rate of the next step is {each.rates[1]:.4g}, not {each.rates[0]:.4g}")
        click.echo(plain_text(f"{run}@step-{each.step}: {'; '.join(lines)}", most=1000))
    if not dry_run:
        click.echo(plain_text(f"{out} is a run; next: `thermopile train --out {out} --resume`", most=1000))
