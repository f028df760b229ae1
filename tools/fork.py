"""`thermopile fork`: a new run that goes on from a checkpoint of another, with some settings changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from ..storage.place import Place, Places
from ..trainer.config.layers import Layers
from ..trainer.errors import ConfigError, RunError
from .arguments import ANY_PLACE, RUN_DATA, TARS
from .printing import plain_text
from .train_options import add_typed

if TYPE_CHECKING:
    from ..trainer.run.fork import Fork


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile fork runs/a --out runs/b --set epochs=30\n"
    "  thermopile fork runs/a@step-4000 --out runs/b --set optimizer.cooldown=0.5\n"
    "  thermopile fork runs/a@step-0 --out runs/b --weights weights.parquet\n"
    "  thermopile fork runs/a --out runs/b --without withdrawn.parquet\n"
    "  thermopile fork runs/a --dry-run --set optimizer.lr=1e-4"
)
@click.argument("source", metavar="RUN[@step-N]")
@click.option("--out", type=ANY_PLACE, help="The new run: a directory, or s3://BUCKET/PATH.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting. Repeatable.")
@click.option("--weights", type=click.Path(path_type=Path), metavar="FILE", help="As for `thermopile train`.")
@click.option(
    "--without",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Forget these samples. Without @step-N, go on from the last checkpoint before any was used, maybe step 0.",
)
@RUN_DATA
@TARS
@click.option("--dry-run", is_flag=True, help="Say what the fork would be, of every kept checkpoint; write nothing.")
def fork(
    source: str,
    out: Place | None,
    overrides: tuple[str, ...],
    weights: Path | None,
    without: Path | None,
    data: Places | None,
    tars: Place | None,
    dry_run: bool,
) -> None:
    """Make OUT a run that goes on from a checkpoint of RUN (the latest, but see --without), with its settings of then.

    Without changes it goes on as RUN did, on CPUs bit for bit. Weights, optimiser and state are linked, not copied,
    where they can be. RUN may train meanwhile, and is not changed. @step-0 begins again.
    """
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out': the new run's directory")
    given = Layers()
    add_typed(given, overrides, data, {"weights": weights, "without": without, "tars": tars})
    from ..trainer.checkpoints.checkpoint_files import checkpoints_in
    from ..trainer.encoders.initial_weights import parts_of
    from ..trainer.run.fork import fork_run, plan_fork
    from ..trainer.run_directory import RunDirectory

    run, step = parts_of(source)
    origin, named = RunDirectory(run), source.removesuffix(f"@{step}")
    kept = sorted({0, *checkpoints_in(origin.checkpoints)})
    names = [f"step-{each}" for each in kept]
    if step and step not in names and origin.exists():
        raise RunError(f"{run} has no checkpoint {step!r}; available: {', '.join(names)}")
    steps = names if dry_run and not step else [step or None]
    failed = 0
    for at in steps:
        try:
            new = plan_fork(origin, at, given) if dry_run or not out else fork_run(origin, at, given, RunDirectory(out))
            line = f"{named}@step-{new.step}: {'; '.join(_facts(new, kept[-1]))}"
        except (ConfigError, RunError) as error:
            if (failed := failed + 1) == len(steps):
                raise
            line = f"{named}@{at}: cannot be forked: {error}"
        click.echo(plain_text(line, most=1000))
    if without is not None:
        click.echo(f"kept: {', '.join(names)}; checkpoint.keep_every keeps more")
        click.echo(
            "other traces, which no fork removes: the dataset's tokenizer, context length and counts; settings derived "
            "from it, such as image_size; files of --select and --weights; runs of --init-from, and theirs; pretrained "
            "encoders"
        )
    if not dry_run:
        following = f"{out} is a run; next: `thermopile train --out {quote(str(out))} --resume`"
        if new.step == new.total_steps:  # which goes by `steps`, too, if the run has a limit of them
            more = "epochs and steps" if new.config.steps else "epochs"
            following = f"{out} is a run whose steps are all done; to train on, fork with --set of more {more}"
        click.echo(plain_text(following, most=1000))


def _facts(fork: Fork, newest: int) -> Iterator[str]:
    yield f"{fork.step:,} of {fork.total_steps:,} steps are done"
    yield from (change.arrow for change in fork.changes)
    yield from fork.jump
    if fork.forgotten:
        have = "has" if fork.used == 1 else "have"
        seen = f"{fork.used:,} {have} been used before" if fork.used else "none has been used before"
        exactly = "" if fork.used or fork.config.init.run else ": forgotten exactly"
        yield f"of {fork.forgotten:,} samples to forget {seen}{exactly}; steps to make again: {newest - fork.step:,}"
