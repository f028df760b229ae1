"""The photographs to load: a folder of files, and the dataset that thermopile made of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ....pipeline.conversion.convert import ConvertSettings, convert
from ....pipeline.dataset import Dataset
from ....pipeline.order import Order
from ....pipeline.sources.folder import FolderSource
from ..photographs import jpegs


class Material(NamedTuple):
    """What all contenders load."""

    dataset: Dataset
    files: list[Path]
    """File of each sample id."""
    order: Order


def prepare(directory: Path, images: int, batch: int) -> Material:
    """Write the files and convert them; the JPEGs are kept byte for byte."""
    folder = directory / "files"
    folder.mkdir()
    for number, jpeg in enumerate(jpegs(images)):
        (folder / f"{number:06d}.jpg").write_bytes(jpeg)
    convert(FolderSource(folder), directory / "dataset", ConvertSettings())
    dataset = Dataset(directory / "dataset")
    files = [folder / key for key in dataset.column("key").to_pylist()]
    return Material(dataset, files, Order.create(images, batch))
