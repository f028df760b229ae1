"""Fork runs at several points, each without some of its samples, and write the page on what experiments on data need.

Every finished fork is a line of RESULTS; what is there is not made again, and the page's tables are made of these lines
alone. Settings are those that the committed search on wrong captions chose.

\b
Exit codes: 75, stopped by a signal; the same command goes on.
"""

from __future__ import annotations

from pathlib import Path

import click

from .reproduce import exit_if, make_runs, options, read
from .reproduction.forked import parts

SEARCHED = Path(__file__).parent / "reproduction" / "wrong_captions.jsonl"


@click.command(help=__doc__)
@options
def main(results_file: Path, page: Path, page_only: bool, processes: int, work: Path) -> None:
    results = read(results_file)
    results.take_searches(read(SEARCHED))
    stopped = not page_only and not make_runs(parts(), results, results_file, work, processes)
    from .reproduction.forked_page import write_page

    click.echo(write_page(results, page))
    exit_if(stopped, results, results_file)


if __name__ == "__main__":
    main()
