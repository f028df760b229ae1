"""Train on data of which a share of the captions is wrong, with and without doubt, and write a page of what was learnt.

Every finished run is a line of RESULTS; what is there is not made again, and the page is made of these lines alone.

\b
Exit codes: 75, stopped by a signal; the same command goes on.
"""

from __future__ import annotations

from pathlib import Path

import click

from thermopile.pipeline.cores import cores
from thermopile.trainer.errors import RunError
from thermopile.trainer.preemption import EXIT_CODE

from .reproduce import make_runs
from .reproduction.results import Results
from .reproduction.wrong import parts


@click.command(help=__doc__)
@click.argument("results_file", metavar="RESULTS", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--page",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the page goes, its picture beside it.",
)
@click.option("--page-only", is_flag=True, help="Make no run.")
@click.option("--processes", default=cores(), show_default="cores", type=click.IntRange(1), help="Runs at a time.")
@click.option("--work", default="reproduction", show_default=True, type=click.Path(file_okay=False, path_type=Path),
              help="Where the datasets go, and runs while they are made.")  # fmt: skip
@click.pass_context
def main(
    context: click.Context, results_file: Path, page: Path, page_only: bool, processes: int, work: Path
) -> None:  # fmt: skip
    try:
        results = Results.read(results_file)
    except RunError as error:
        raise click.ClickException(str(error)) from error
    stopped = not page_only and not make_runs(parts(), results, results_file, work, processes)
    from .reproduction.wrong_page import write_page  # which imports matplotlib

    click.echo(write_page(results, page))
    if stopped:
        click.echo(f"stopped with {len(results)} runs in {results_file}; the same command goes on", err=True)
        context.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
