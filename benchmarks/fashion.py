"""Make the pictures of Fashion-MNIST: FOLDER/train.parquet and test.parquet, which `thermopile convert parquet` reads.

They are those of Debian's package dataset-fashion-mnist, 31 MB, which is fetched into FOLDER once. `--longtail 100`
cuts the training set by the papers' rule to 14,886 pictures; the test set keeps 1,000 of each class.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from thermopile.pipeline.sources import ClassGroups
from thermopile.pipeline.sources.splits import hold_out, long_tail

from .openclipart import fetch

PACKAGE = "dataset-fashion-mnist"
ROOT = Path("usr/share/datasets/fashion-mnist")
FILES = {"train": "train", "test": "t10k"}
DEVELOPMENT, RATIO = 5_000, 100
"""Pictures of the training set that searches are scored on, as many of each class; and the ratio of the long tail."""
CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle_boot")


@click.command(help=__doc__)
@click.argument("folder", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    make(folder)
    click.echo(f"next: thermopile convert parquet {folder}/train.parquet OUT --longtail 100\n"
               f"and:  thermopile convert parquet {folder}/test.parquet OUT-test")  # fmt: skip


def make(folder: Path) -> None:
    """Write train.parquet and test.parquet."""
    fetch(folder, [PACKAGE])
    for name, prefix in FILES.items():
        files = folder / PACKAGE / ROOT
        pictures = values(files / f"{prefix}-images-idx3-ubyte.gz")
        labels = values(files / f"{prefix}-labels-idx1-ubyte.gz")
        columns = {"image": [*pngs(pictures)], "label": [CLASSES[label] for label in labels]}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=10_000)


def split(groups: ClassGroups, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which pictures of the training set, int64, ascending, are for training, long-tailed, and for searches."""
    others, development = hold_out(len(groups.of_sample), groups, DEVELOPMENT, seed)
    return long_tail(others, groups, RATIO, seed), development


def values(path: Path) -> NDArray[np.uint8]:
    """Return the labels, [n], or pictures, [n, height, width], of one of the published files."""
    with gzip.open(path) as file:
        content = file.read()
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape.tolist())


def pngs(pictures: NDArray[np.uint8]) -> Iterator[bytes]:
    for picture in pictures:
        file = BytesIO()
        Image.fromarray(picture).save(file, "PNG")
        yield file.getvalue()


if __name__ == "__main__":
    main()
