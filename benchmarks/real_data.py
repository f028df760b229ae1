"""Compare methods on icons, glyphs and Fashion-MNIST, and write a page: the papers' claims, and what to choose.

Every finished run is a line of RESULTS, which the same command goes on with; the page is made of these lines alone. The
code must stay as it is from the first run to the last: run it in a worktree of its own, with RESULTS in another.

WORK/sources/icons.parquet is made by benchmarks.icons if it is not there. The estimate is printed before runs begin.
The environment variable REAL_DATA_EPOCHS, for tests, is the number of epochs of every run.

\b
Exit codes: 75, stopped by a signal; the same command goes on.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import click

from .reproduce import COMMITTED, exit_if, make_runs, options, read
from .reproduction.real_claims import every_part
from .reproduction.results import beside


@click.command(help=__doc__)
@options
@click.option("--commit", "commits", is_flag=True, help="Commit RESULTS, where it is, after every run.")
def main(results_file: Path, page: Path, page_only: bool, processes: int, work: Path, commits: bool) -> None:
    results, plan = read(results_file), every_part()
    results.take_searches(read(COMMITTED))
    if not page_only:
        from .reproduction.real_sets import described

        for data in ("icons", "fashion"):
            if not results.tests(data):
                results.add_tests(data, described(work, data), results_file)
    stopped = not page_only and not make_runs(
        plan, results, results_file, work, processes, lambda: commit(results_file, len(results)) if commits else None
    )
    from .reproduction.real_page import write_page

    click.echo(write_page(results, page))
    exit_if(stopped, results, results_file)


def commit(file: Path, count: int) -> None:
    """Commit the results alone; where another command holds the repository, the next run's commit has both lines."""
    files = [str(file.resolve()), str(beside(file).resolve())]
    git = ["git", "-C", str(file.resolve().parent)]
    subprocess.run([*git, "add", *files], check=False)
    subprocess.run([*git, "commit", "--quiet", "--message", f"{count} runs on real data", "--", *files], check=False)


if __name__ == "__main__":
    main()
