"""Compare methods on icons, glyphs and Fashion-MNIST, and write a page: the papers' claims, and what to choose.

Every finished run is a line of RESULTS, which the same command goes on with; the page is made of these lines alone. All
runs are of one commit: make them in a worktree of their own, with RESULTS in another. benchmarks.icons makes
WORK/sources/icons.parquet if it is missing. For tests, REAL_DATA_EPOCHS in the environment is the epochs of every run.

\b
Exit codes: 75, stopped by a signal; the same command goes on.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import click

from thermopile.storage.files import write_atomically

from .reproduce import COMMITTED, exit_if, make_runs, options, read
from .reproduction.real_claims import every_part
from .reproduction.real_page import to_markdown
from .reproduction.real_sets import described
from .reproduction.results import beside


@click.command(help=__doc__)
@options
@click.option("--commit", "commits", is_flag=True, help="Commit RESULTS, in its own worktree, after every run.")
def main(results_file: Path, page: Path, page_only: bool, processes: int, work: Path, commits: bool) -> None:
    results = read(results_file)
    results.take_searches(read(COMMITTED))
    for data in ("icons", "fashion"):
        if not page_only and not results.tests(data):
            results.add_tests(data, described(work, data), results_file)
    added = (lambda: commit(results_file)) if commits else (lambda: None)
    stopped = not page_only and not make_runs(every_part(), results, results_file, work, processes, added)
    write_atomically(page, to_markdown(results).encode())
    click.echo(page)
    exit_if(stopped, results, results_file)


def commit(file: Path) -> None:
    """Commit the results alone; where another command holds the repository, the next run's commit has these lines."""
    files = [str(each.resolve()) for each in (file, beside(file))]
    git = ["git", "-C", str(file.resolve().parent)]
    subprocess.run([*git, "add", *files], check=False)
    subprocess.run([*git, "commit", "--quiet", "--message", "A run on real data", "--", *files], check=False)


if __name__ == "__main__":
    main()
