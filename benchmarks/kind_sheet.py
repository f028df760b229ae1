"""Draw 36 random samples of a kind that `thermopile inspect` tells in RUN, each above the nearest three, as a PNG.

Columns are samples, with their captions or classes; below each are the nearest, by its features, with their cosines.

\b
Example:
  python -m benchmarks.kind_sheet RUN not_told_apart --out sheet.png
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from textwrap import fill, shorten

import click
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from thermopile.pipeline.opening import Dataset
from thermopile.storage.local import LocalPath
from thermopile.tools.inspection.feature_findings.by_features import by_features
from thermopile.tools.inspection.feature_findings.properties import properties
from thermopile.tools.inspection.features.run_features import Asked, drawn_features, visited_features
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.kinds import BY_FEATURES, KIND_NAMES
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.trainer.run_directory import RunDirectory

SHOWN, A_ROW, INCHES = 36, 12, 1.1


@click.command(help=__doc__)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("kind", type=click.Choice([KIND_NAMES[code] for code in BY_FEATURES]))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(run: Path, kind: str, out: Path) -> None:
    columns, count = columns_of(run.absolute(), kind)
    click.echo(f"{count:,} are {kind}; {len(columns)} drawn of them")
    inspection = read_run(RunDirectory(LocalPath(run.absolute())))
    assert inspection.dataset is not None
    bands = -(-len(columns) // A_ROW)
    figure = Figure((A_ROW * INCHES, bands * 4 * INCHES * 1.25), layout="constrained")
    cells = figure.subplots(bands * 4, A_ROW, squeeze=False)
    for cell in cells.flat:
        cell.set_axis_off()
    for place, column in enumerate(columns):
        for depth, (sample_id, cosine) in enumerate(column):
            cell = cells[place // A_ROW * 4 + depth, place % A_ROW]
            cell.imshow(Image.open(BytesIO(inspection.dataset.jpeg(sample_id))), cmap="gray")
            title = f"{sample_id} " if depth == 0 else f"{cosine:.2f} "
            cell.set_title(
                fill(shorten(title + named(inspection.dataset, sample_id), 44, placeholder=" …"), 18), fontsize=6
            )
    figure.savefig(out, dpi=110, pil_kwargs={"optimize": True})


def columns_of(run: Path, kind: str) -> tuple[list[list[tuple[int, float]]], int]:
    """Return at most SHOWN samples of a kind, each as ids with cosines, its own first, and how many there are."""
    inspection = read_run(RunDirectory(LocalPath(run)))
    found = survey(inspection)
    assert found is not None
    assert inspection.reader is not None
    report = run / "report"
    report.mkdir(exist_ok=True)
    told = by_features(inspection, found, report, Asked(), None, lambda what, done, total: None)
    assert told is not None, inspection.notes
    features = visited_features(drawn_features(inspection, report, Asked()), inspection.reader, inspection.planted[0])
    of = properties(inspection, features, found.pool, lambda what, done, total: None)
    around = of.around["pictures"]
    ids = told.kinds.sample_ids[told.kinds.codes == KIND_NAMES.index(kind)]
    drawn = np.searchsorted(of.sample_ids, np.sort(np.random.default_rng(0).permutation(ids)[:SHOWN]))
    return [
        [(int(of.sample_ids[place]), 1.0),
         *zip(of.sample_ids[around.nearest[place]].tolist(), around.similarity[place].tolist(), strict=True)]
        for place in drawn.tolist()
    ], len(ids)  # fmt: skip


def named(dataset: Dataset, sample_id: int) -> str:
    [row] = dataset.rows([sample_id])
    return str(row.get("caption") or row.get("group") or "")


if __name__ == "__main__":
    main()
