"""Pictures of noise with captions, as large as photographs of their bytes; for tests that count bytes."""

import numpy as np
from PIL import Image

from thermopile.benchmarks.made import PairSource
from thermopile.pipeline.sources import Sample


class NoiseSource(PairSource):
    """`samples` pairs of about 4 KB each, every one of its own, in shards of 4 MB or more."""

    def __getitem__(self, index: int) -> Sample:
        pixels = np.random.default_rng(index).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        return super().__getitem__(index)._replace(picture=Image.fromarray(pixels))

    def stored_bytes(self) -> int:
        return len(self) * 4096
