"""Datasets to mix: parts of the glyphs, all with the glyphs' tokenizer, two of them in folders of one name."""

import numpy as np

from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.dataset_source import DatasetSource

from support.conversions import dataset_of


def made_parts(glyphs: Dataset, folder, *sizes: int) -> list[Dataset]:
    """Write parts of these numbers of the glyphs, from the first one on."""
    parts, start = [], 0
    tokens = {"tokenizer": glyphs.tokenizer_path, "context_length": glyphs.index.tokenizer.context_length}
    for name, size in zip(("a/glyphs", "b/glyphs", "c/rare"), sizes, strict=False):
        (folder / name).parent.mkdir(parents=True)
        parts.append(dataset_of(DatasetSource(glyphs.path), folder / name, np.arange(start, start + size), **tokens))
        start += size
    return parts
