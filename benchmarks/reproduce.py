"""Train the papers' methods on the glyphs, score them, and write a page: their claims beside what was seen.

OUT holds the datasets and a run directory for every run; what is there is not made again.

\b
Exit codes: 75, stopped by a signal; the same command goes on.
"""

from __future__ import annotations

from pathlib import Path

import click

from thermopile.pipeline.dataset import Dataset

from reproduction.page import write_page
from reproduction.plan import FULL, SHORT
from reproduction.running import EXIT_CODE_STOPPED, Sets, make_runs, thermopile


@click.command(help=__doc__)
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--full", is_flag=True, help="Two batch sizes and three seeds: hours instead of half an hour.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path),
              help="Where the page goes, its picture beside it; OUT/reproduction.md by default.")  # fmt: skip
@click.pass_context
def main(context: click.Context, out: Path, full: bool, page: Path | None) -> None:
    plan, glyphs, results = FULL if full else SHORT, out / "glyphs", None
    if thermopile("convert", "glyphs", str(glyphs), "--resume"):
        results = make_runs(plan, Sets(Dataset(glyphs), Dataset(out / "glyphs-test")), out)
    if results is None:
        click.echo(f"{out}: stopped; the same command goes on", err=True)
        context.exit(EXIT_CODE_STOPPED)
    click.echo(write_page(results, plan, page or out / "reproduction.md"))


if __name__ == "__main__":
    main()
