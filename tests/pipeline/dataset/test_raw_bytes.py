"""XXH64 beside its reference."""

import numpy as np
import pytest
import xxhash

from thermopile.pipeline.dataset.raw_bytes import xxh64


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_bytes_of_every_length_and_place_in_memory_have_the_reference_s_checksum(seed):
    data = np.random.default_rng(seed % 7).integers(0, 256, 300, dtype=np.uint8)
    for length in [*range(150), 290]:
        part = data[length % 9 :][:length]  # also at an odd address
        assert xxh64(part, np.uint64(seed)) == xxhash.xxh64_intdigest(part.tobytes(), seed)
