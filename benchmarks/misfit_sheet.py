"""Draw the first misfits of a run on public-domain drawings with their titles: docs/misfits.png.

The drawings are those of benchmarks.openclipart with the captions that their authors gave them; nothing is altered. The
run is a first one, with the preset `small` as it is. FOLDER keeps the drawings, the dataset and the run. With --icons,
they are the 38,000 icons of benchmarks.kinds with their names, and the run has its settings.

\b
Examples:
  python -m benchmarks.misfit_sheet FOLDER
  python -m benchmarks.misfit_sheet FOLDER --first 100 --planted 0.07 --out docs/first_misfits.png
  PYTHONPATH=build/resvg python -m benchmarks.misfit_sheet FOLDER --icons --first 100 --planted 0.01 --out icons.png
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
from thermopile.tools.inspection.temperatures.misfits import misfit_sentences, misfits
from thermopile.trainer.run_directory import RunDirectory

from . import openclipart
from .glyph_runs import thermopile, trained
from .kinds import BATCH, DATA, planted_data
from .kinds import Run as KindsRun

INCHES = 1.45
LETTERS, LINES = 22, 3
"""Of a caption on the sheet: letters of a line, and lines."""


@click.command(help=__doc__)
@click.argument("folder", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path))
@click.option("--out", default="docs/misfits.png", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--first", default=24, show_default=True, help="Misfits on the sheet.")
@click.option("--planted", default=0.0, help="Setting data.planted; tells how many wrong captions are expected.")
@click.option("--icons", "with_icons", is_flag=True, help="Of icons instead of drawings.")
def main(folder: Path, out: Path, first: int, planted: float, with_icons: bool) -> None:
    folder, settings = folder.absolute(), dict[str, object]()
    if with_icons:
        data, of = planted_data(folder, KindsRun("icons-40000", "plain", 0)), DATA["icons-40000"]
        settings = {"epochs": of.epochs, "batch_size": BATCH, **of.settings}
    else:
        openclipart.make(folder / "openclipart")
        data = folder / "data"
        thermopile("convert", "csv", folder / "openclipart" / "pairs.csv", data, "--group", "folder", "--resume")
    name = ("icons-" if with_icons else "") + ("planted" if planted else "run")
    settings |= {"data.planted": planted} if planted else {}
    inspection = read_run(RunDirectory(trained(data, folder / name, settings, preset="small")))
    ids, expected, at_tau_min = misfits(inspection, lambda task, done, total: None)
    click.echo("\n".join(misfit_sentences(inspection, expected, at_tau_min)))
    columns, shown, dataset = 8 if first <= 24 else 10, ids[:first].tolist(), Dataset(data)
    rows = -(-first // columns)
    figure = Figure((columns * INCHES, rows * INCHES * 1.35), layout="constrained")
    cells = figure.subplots(rows, columns).flat[:first]
    for cell, number, row in zip(cells, shown, dataset.rows(shown), strict=True):
        cell.imshow(Image.open(BytesIO(dataset.jpeg(number))))
        cell.set_axis_off()
        caption = shorten(row["caption"], LETTERS * LINES, placeholder=" …")
        cell.set_title(fill(caption, LETTERS), fontsize=8)
        click.echo(f"{row['sample_id']}: {row['caption']}")
    figure.savefig(out, dpi=120 if first <= 24 else 72, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
