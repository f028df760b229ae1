"""Speed and memory of `thermopile embed`, beside the encoders alone, which are given ready batches.

\b
Example:
  python -m benchmarks.embed --scale small
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.dataset.tokenizer import load_tokenizer
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources import Sample
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.tools.embed import NUMPY_TYPES, write_features
from thermopile.trainer.config import EncoderConfig, ModelConfig
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.evaluation.features import some_features
from thermopile.trainer.run.build import device_named

from .harness import Figure, Measured, Part, memory_in_use, script, take_turns, timed
from .made import PairSource, repeat_shard

TEXT = EncoderConfig(
    name="hf:clip-text",
    config={"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
)


@dataclass(frozen=True)
class Sizes:
    """A dataset of pairs, and encoders for it."""

    rows: int = 20_000
    """Rows of the dataset."""
    stored: int = 256
    """Pixels of the shorter side of the stored pictures."""
    pixels: int = 224
    batch: int = 256
    image: str = "hf:resnet-50"
    rounds: int = 3


class Pictures(PairSource):
    """Pairs with pictures of `stored` by `stored` pixels, as smooth as photographs."""

    def __init__(self, samples: int, stored: int) -> None:
        super().__init__(samples)
        self._stored = stored

    def __getitem__(self, index: int) -> Sample:
        coarse = np.random.default_rng(index).integers(
            0, 256, (self._stored // 8, self._stored // 8, 3), dtype=np.uint8
        )
        picture = Image.fromarray(coarse).resize((self._stored, self._stored), Image.Resampling.BICUBIC)
        return super().__getitem__(index)._replace(picture=picture)


def make_dataset(sizes: Sizes, path: Path) -> Dataset:
    """As many rows as the sizes say: pictures of 1,000 samples at most are made and stored."""
    rows = min(1000, sizes.rows)
    convert(Pictures(rows, sizes.stored), path, ConvertSettings(), workers=1)
    return repeat_shard(path, max(1, sizes.rows // rows))


def make_encoders(sizes: Sizes, dataset: Dataset) -> Encoders:
    """Encoders with random weights, on the device that `thermopile embed` takes."""
    torch.manual_seed(0)
    config = ModelConfig(dim=256, image=EncoderConfig(name=sizes.image), text=TEXT)
    encoders = Encoders.create(config, "bimodal", sizes.pixels, dataset.index.tokenizer, pretrained=False)
    return encoders.eval().to(device_named("auto"))


def embed(sizes: Sizes, dataset: Dataset, encoders: Encoders, out: Path) -> list[int]:
    """What the command does once it has read a checkpoint. Return the bytes of RAM in use after each batch."""
    assert dataset.index.tokenizer is not None
    tokenizer = load_tokenizer(dataset.tokenizer_path, context_length=dataset.index.tokenizer.context_length)
    view, used = (RECIPES["clip"], sizes.pixels, device_named("auto")), []

    def noted(made: Iterable[list[Tensor]]) -> Iterator[list[Tensor]]:
        for features in made:
            used.append(memory_in_use())
            yield features

    with closing(some_features(encoders, dataset, None, *view, tokenizer=tokenizer, rows=sizes.batch)) as made:
        write_features(out, dataset, noted(made), sizes.batch, NUMPY_TYPES["half"], {})
    return used


def encode_alone(sizes: Sizes, dataset: Dataset, encoders: Encoders) -> None:
    """As many forward passes, of one batch that is on the device."""
    assert dataset.index.tokenizer is not None
    device = device_named("auto")
    pictures = torch.randn(sizes.batch, 3, sizes.pixels, sizes.pixels, device=device)
    tokens = torch.from_numpy(dataset.shard(0).tokens(np.arange(sizes.batch))).to(device)
    with torch.inference_mode():
        for first in range(0, dataset.n, sizes.batch):
            rows = slice(0, min(sizes.batch, dataset.n - first))
            encoders.image(pictures[rows]).cpu()
            if encoders.text is not None:
                encoders.text(tokens[rows]).cpu()


def measure_speed(sizes: Sizes, directory: Path) -> Measured:
    """Turns of the command and the encoders alone."""
    dataset = make_dataset(sizes, directory / "data")
    encoders = make_encoders(sizes, dataset)
    turns = {
        "embed": lambda _: dataset.n / timed(embed, sizes, dataset, encoders, directory / "features.parquet"),
        "alone": lambda _: dataset.n / timed(encode_alone, sizes, dataset, encoders),
    }
    rates = take_turns("rounds", turns, sizes.rounds)
    return Measured(
        f"{dataset.n:,} pairs of {sizes.stored} px, {sizes.image} at {sizes.pixels} px and a text tower of 2 layers, "
        f"batch {sizes.batch}, {device_named('auto')}; medians of {sizes.rounds} rounds",
        "the encoders alone, on ready batches",
        [
            Figure.of_rounds(
                "rows_per_second", "rows a second", "rows/s", rates["embed"], rates["alone"],
                more_is_better=True, ratio_at_least=0.9,
            )
        ],
    )  # fmt: skip


def measure_memory(sizes: Sizes, directory: Path) -> Measured:
    """One run; small encoders, for memory alone."""
    dataset = make_dataset(sizes, directory / "data")
    used = np.array(embed(sizes, dataset, make_encoders(sizes, dataset), directory / "features.parquet")) / 1e6
    tenths = np.array_split(used, 10)
    return Measured(
        f"embedding {dataset.n:,} pairs of {sizes.stored} px at {sizes.pixels} px, batch {sizes.batch}",
        "the same run, while its second tenth is embedded",
        [
            Figure(
                "megabytes", "memory in use in the last tenth", "MB", tenths[-1].mean(), tenths[1].mean(),
                ratio_at_least=1 / 1.1,
            )
        ],
        [f"Means of all tenths, MB: {', '.join(f'{tenth.mean():,.0f}' for tenth in tenths)}; most: {used.max():,.0f}."],
    )  # fmt: skip


SMALL = Sizes(rows=160, stored=32, pixels=32, batch=16, image="conv", rounds=1)
PARTS = {
    "speed": Part(measure_speed, Sizes(), SMALL),
    "memory": Part(measure_memory, Sizes(rows=1_000_000, image="conv", pixels=32, stored=32), SMALL),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "torch")()
