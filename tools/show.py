"""`thermopile show`: draw samples and their augmented views on one page, to check before training."""

from pathlib import Path

import click

from ..storage.place import Place
from .arguments import DATASET, TARS

MAX_SAMPLES = 200


def _parse_ids(context: click.Context, option: click.Parameter, value: str | None) -> list[int] | None:
    try:
        ids = None if value is None else [int(word) for word in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of ids such as 1,5,9") from None
    if ids and len(ids) > MAX_SAMPLES:
        raise click.BadParameter(f"{len(ids):,} ids; a sheet shows at most {MAX_SAMPLES}")
    return ids


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile show data/glyphs --out sheet.html\n"
    "  thermopile show data/pictures --out sheet.html --recipe simclr --epoch 3\n"
    "  thermopile show data/pictures --out sheet.html --ids 1,5,9 --image-size 32 --overwrite"
)
@click.argument("dataset", type=DATASET)
@TARS
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The HTML page to write.")
@click.option(
    "--recipe",
    metavar="NAME",
    help="As data.recipe in training, also module:name. Default: clip for pairs and crop_flip for images only.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, MAX_SAMPLES),
    default=12,
    show_default=True,
    help="Number of samples, drawn with the seed.",
)
@click.option("--ids", metavar="ID,ID,…", callback=_parse_ids, help="Show these samples instead.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Seed, as in training.")
@click.option("--epoch", type=click.IntRange(0, 2**32), default=0, show_default=True, help="Epoch, counted from 0.")
@click.option("--image-size", type=click.IntRange(8, 1024), help="Side of views, in pixels. Default: as in training.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def show(
    dataset: Place,
    tars: Place | None,
    out: Path,
    recipe: str | None,
    samples: int,
    ids: list[int] | None,
    seed: int,
    epoch: int,
    image_size: int | None,
    overwrite: bool,
) -> None:
    """Write a page of samples of DATASET: the stored picture, two augmented views, id, caption and class.

    The views are the ones that training with this seed makes in this epoch; frames on the stored picture mark the
    crops. Pairs have one view per epoch, so this epoch's and the next one's are shown.
    """
    import numpy as np

    from ..pipeline.opening import Dataset, usual_image_size
    from ..storage.files import write_atomically
    from ..trainer.plugins import announce_code, is_plugin
    from .inspection.rows_export import check_target

    check_target(out, [".html"], overwrite=overwrite)
    opened = Dataset(dataset, tars)
    if outside := [sample_id for sample_id in ids or () if not 0 <= sample_id < opened.n]:
        raise click.UsageError(f"--ids: sample {outside[0]} does not exist; the dataset holds 0 to {opened.n - 1}")
    if ids is None:
        ids = sorted(np.random.default_rng(seed).choice(opened.n, min(samples, opened.n), replace=False).tolist())
    image_size = image_size or usual_image_size(opened)
    if recipe in (None, "auto"):
        recipe = "clip" if opened.index.mode == "pairs" else "crop_flip"
    if is_plugin(recipe):
        announce_code({"the recipe": recipe})
    from .report.html import document, part
    from .sample_sheet import shown_samples  # last, because it imports torch

    shown = shown_samples(opened, np.array(ids, np.int64), recipe, seed=seed, epoch=epoch, image_size=image_size)
    number = f"{len(ids):,} of {opened.n:,} samples"
    facts = f"recipe {recipe}  ·  views {image_size}×{image_size}  ·  seed {seed}  ·  epoch {epoch}  ·  {number}"
    parts = {"Pictures and views": part("sections.html", "views", shown)}
    write_atomically(out, document("Samples of", opened.name, facts, "", [], parts).encode())
    click.echo(f"{out}: {number}, recipe {recipe}")
