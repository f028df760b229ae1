"""Draw the first misfits of a run on public-domain drawings with their titles: docs/misfits.png.

The drawings are those of benchmarks.openclipart with the captions that their authors gave them; nothing is altered. The
run is a first one, with the preset `small` as it is. FOLDER keeps the drawings, the dataset and the run.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from textwrap import fill, shorten

import click
from matplotlib.figure import Figure
from PIL import Image

from thermopile.pipeline.opening import Dataset
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.misfits import misfits
from thermopile.trainer.run_directory import RunDirectory

from . import openclipart
from .glyph_runs import thermopile, trained

COLUMNS, ROWS, INCHES = 8, 3, 1.45
LETTERS, LINES = 22, 3
"""Of a caption on the sheet: letters of a line, and lines."""


@click.command(help=__doc__)
@click.argument("folder", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path))
@click.option("--out", default="docs/misfits.png", type=click.Path(dir_okay=False, path_type=Path))
def main(folder: Path, out: Path) -> None:
    folder = folder.absolute()
    openclipart.make(folder / "openclipart")
    data = folder / "data"
    thermopile("convert", "csv", folder / "openclipart" / "pairs.csv", data, "--group", "folder", "--resume")
    run = trained(data, folder / "run", {}, preset="small")
    ids, _ = misfits(read_run(RunDirectory(run)), lambda task, done, total: None)
    shown = ids[: COLUMNS * ROWS].tolist()
    dataset = Dataset(data)
    figure = Figure((COLUMNS * INCHES, ROWS * INCHES * 1.35), layout="constrained")
    cells = figure.subplots(ROWS, COLUMNS).flat
    for cell, number, row in zip(cells, shown, dataset.rows(shown), strict=True):
        cell.imshow(Image.open(BytesIO(dataset.jpeg(number))))
        cell.set_axis_off()
        caption = shorten(row["caption"], LETTERS * LINES, placeholder=" …")
        cell.set_title(fill(caption, LETTERS), fontsize=8)
        click.echo(f"{row['sample_id']}: {row['caption']}")
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
