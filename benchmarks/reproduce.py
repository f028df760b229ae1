"""Train the papers' methods on the glyphs, score them, and write a page: their claims beside what was seen.

Every finished run is a line of RESULTS; what is there is not made again, and the page is made of these lines alone.
Without --full the methods on pairs are trained with the settings that the committed searches chose.

\b
Exit codes: 75, stopped by a signal; the same command goes on.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import click

from thermopile.pipeline.cores import cores
from thermopile.trainer.errors import RunError
from thermopile.trainer.run.preemption import EXIT_CODE

from .reproduction.results import Results
from .reproduction.schedule import Part, missing, parts, runs_of

COMMITTED = Path(__file__).parent / "reproduction" / "results.jsonl"


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Add what both reproductions take: the results, where the page goes, and how runs are made."""
    file, folder = click.Path(dir_okay=False, path_type=Path), click.Path(file_okay=False, path_type=Path)
    for option in (
        click.option("--work", default="reproduction", show_default=True, type=folder,
                     help="Where the datasets go, and runs while they are made."),
        click.option("--processes", default=cores(), show_default="cores", type=click.IntRange(1),
                     help="Runs at a time."),
        click.option("--page-only", is_flag=True, help="Make no run."),
        click.option("--page", required=True, type=file, help="Where the page goes, its pictures beside it."),
        click.argument("results_file", metavar="RESULTS", type=file),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command(help=__doc__)
@options
@click.option("--full", is_flag=True, help="Every search and comparison: a day of one core.")
def main(results_file: Path, page: Path, page_only: bool, processes: int, work: Path, full: bool) -> None:
    results, plan = read(results_file), parts(full=full)
    if not full:
        results.take_searches(read(COMMITTED))
    stopped = not page_only and not make_runs(plan, results, results_file, work, processes)
    if len(results):
        from .reproduction.page import write_page  # which imports matplotlib

        click.echo(write_page(results, page))
    elif page_only:
        raise click.ClickException(f"{results_file} has no runs to make a page of; leave out --page-only to make some")
    exit_if(stopped, results, results_file)


def read(file: Path) -> Results:
    """Return the results of a file."""
    try:
        return Results.read(file)
    except RunError as error:
        raise click.ClickException(str(error)) from error


def exit_if(stopped: bool, results: Results, file: Path) -> None:
    """Exit if a signal stopped the runs."""
    if stopped:
        click.echo(f"stopped with {len(results)} runs in {file}; the same command goes on", err=True)
        raise SystemExit(EXIT_CODE)


def make_runs(
    plan: list[Part], results: Results, file: Path, work: Path, processes: int, added: Callable[[], None] = lambda: None
) -> bool:
    """Make what is missing, and call `added` after each run; False if a signal stopped it."""
    from .reproduction.running import Made, StoppedError, commit, make_missing  # which imports torch

    if results.commit not in (None, commit()):
        raise click.ClickException(f"{file} holds runs of commit {results.commit}, and this is {commit()}: check that "
                                   "out, or name another file")  # fmt: skip

    def add(made: Made) -> None:
        results.append(made.result, made.right, file)
        added()
        click.echo(f"{len(results)} runs; {_minutes_left(plan, results) // processes} minutes left", err=True)

    for part in plan:
        count = len(runs_of([part], results))
        hours = count * part.seconds / 3600
        click.echo(
            f"{count - len(missing([part], results)):4d} of {count:3d} made {hours:5.2f} h  {part.name}", err=True
        )
    click.echo(f"{_minutes_left(plan, results) // processes} minutes, {processes} runs at a time", err=True)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        make_missing(lambda: [run for run in missing(plan, results) if run], work, add, processes)
    except (KeyboardInterrupt, StoppedError):
        return False
    return True


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _minutes_left(plan: list[Part], results: Results) -> int:
    """Estimate it, on one core, from what a run of each part should take and how much longer finished ones took."""
    expected = taken = 0.0
    for part in plan:
        for result in (found for run in part.runs(results) if run and (found := results.of(run))):
            expected, taken = expected + part.seconds, taken + result.seconds
    left = sum(part.seconds * len(missing([part], results)) for part in plan)
    return round(left * (taken / expected if expected else 1) / 60)


if __name__ == "__main__":
    main()
