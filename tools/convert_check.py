"""`thermopile convert check`: verify that a dataset on disk is what was converted."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .dataset_path import DatasetPath
from .plain_text import plain_text
from .progress import progress_bar

if TYPE_CHECKING:
    from ..pipeline.conversion.check import Finding

MAX_OF_A_KIND = 10


@click.command(
    short_help="Check that a dataset is sound.",
    epilog="\b\nExamples:\n"
    "  thermopile convert check data/pictures\n"
    "  thermopile convert check data/pictures --json\n\n"
    "Exit codes: 0 sound, 1 not sound or not found, 2 wrong usage.",
)
@click.argument("dataset", type=DatasetPath())
@click.option("--workers", type=click.IntRange(1), help="Threads. Default: one per core.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
@click.pass_context
def check(context: click.Context, dataset: Path, workers: int | None, as_json: bool) -> None:
    """Check that DATASET is sound: read every byte and decode every picture.

    Compares shards with their digests, tables with the FFCV files, pictures with their recorded sizes and tokens with
    the captions. Ids must be dense, and no source sample may occur twice.
    """
    from ..pipeline.dataset_index import read_index

    samples = read_index(dataset).n
    from ..pipeline.conversion.check import check_dataset  # late, because it imports torch

    with progress_bar(f"checking {dataset.name}", samples) as bar:
        findings = list(check_dataset(dataset, workers=workers, on_progress=bar.update))
    if as_json:
        found = [finding._asdict() for finding in findings]
        click.echo(json.dumps({"dataset": str(dataset), "samples": samples, "sound": not found, "findings": found}))
    elif findings:
        _print(findings)
    else:
        click.echo(f"{dataset} is sound: {samples:,} samples")
    if findings:
        context.exit(1)


def _print(findings: list[Finding]) -> None:
    of_kind: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        of_kind[finding.kind].append(finding)
    for kind, found in of_kind.items():
        for finding in found[:MAX_OF_A_KIND]:
            click.echo(f"{kind}: {finding.where}: {plain_text(finding.what)}")
        if len(found) > MAX_OF_A_KIND:
            click.echo(f"{kind}: and {len(found) - MAX_OF_A_KIND:,} more")
    click.echo("Not sound. Convert the dataset again, or copy it again from its origin.")
