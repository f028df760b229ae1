"""`thermopile reproduce`: the papers' methods compared on the embedded example, as a page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    epilog="\b\nExamples:\n  thermopile reproduce reproduction\n  thermopile reproduce reproduction --full\n\n"
    "Exit codes: 75, stopped by a signal; the same command goes on."
)
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--full", is_flag=True, help="Two batch sizes and three seeds: hours instead of half an hour.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path),
              help="Where the page goes, its picture beside it; OUT/reproduction.md by default.")  # fmt: skip
@click.pass_context
def reproduce(context: click.Context, out: Path, full: bool, page: Path | None) -> None:
    """Train the papers' methods on the glyphs, score them, and write a page: their claims beside what was seen.

    OUT holds the datasets and a run directory for every run; what is there is not made again.
    """
    from ..pipeline.dataset import Dataset
    from ..trainer.preemption import EXIT_CODE
    from .cli import main
    from .reproduce.page import write_page
    from .reproduce.plan import FULL, SHORT
    from .reproduce.running import Sets, make_runs

    def command(arguments: list[str]) -> bool:
        return bool(main(arguments, standalone_mode=False) != EXIT_CODE)

    glyphs = out / "glyphs"
    command(["convert", "glyphs", str(glyphs), "--resume"])
    sets = Sets(Dataset(glyphs), Dataset(out / "glyphs-test"))
    plan = FULL if full else SHORT
    results = make_runs(plan, sets, out, command, lambda words: click.echo(words, err=True))
    if results is None:
        click.echo(f"{out}: stopped; the same command goes on", err=True)
        context.exit(EXIT_CODE)
    written = write_page(results, plan, page or out / "reproduction.md")
    click.echo(written)
