"""Train on data of which a share of the captions is wrong, with and without doubt, and write a page of what was learnt.

Every finished run is a line of RESULTS; what is there is not made again, and the page is made of these lines alone.

\b
Exit codes: 75, stopped by a signal; the same command goes on.
"""

from __future__ import annotations

from pathlib import Path

import click

from .reproduce import exit_if, make_runs, options, read
from .reproduction.wrong import parts


@click.command(help=__doc__)
@options
def main(results_file: Path, page: Path, page_only: bool, processes: int, work: Path) -> None:
    results = read(results_file)
    stopped = not page_only and not make_runs(parts(), results, results_file, work, processes)
    from .reproduction.wrong_page import write_page  # which imports matplotlib

    click.echo(write_page(results, page))
    exit_if(stopped, results, results_file)


if __name__ == "__main__":
    main()
