"""Fashion-MNIST as published, as Parquet files."""

import gzip
import io
import struct

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from thermopile.benchmarks import fashion
from thermopile.benchmarks.fashion import FILES, PACKAGE, ROOT, make
from thermopile.pipeline.sources.listing import binary_arrays, groups_by_name


def test_pictures_keep_their_pixels_and_labels_become_names(tmp_path):
    pictures = np.random.default_rng(0).integers(0, 256, (3, 4, 5), np.uint8)
    (files := tmp_path / PACKAGE / ROOT).mkdir(parents=True)
    for prefix in FILES.values():
        for name, header, values in (
            ("images-idx3", struct.pack(">4B3I", 0, 0, 8, 3, *pictures.shape), pictures.tobytes()),
            ("labels-idx1", struct.pack(">4BI", 0, 0, 8, 1, 3), bytes([9, 0, 1])),
        ):
            (files / f"{prefix}-{name}-ubyte.gz").write_bytes(gzip.compress(header + values))
    make(tmp_path)
    for name in FILES:
        columns = pq.read_table(tmp_path / f"{name}.parquet").to_pydict()
        assert columns["label"] == ["Ankle_boot", "T-shirt", "Trouser"]
        read = [np.asarray(Image.open(io.BytesIO(png))) for png in columns["image"]]
        assert np.array_equal(read, pictures)


def test_searches_are_scored_on_pictures_that_no_run_learns_from(monkeypatch):
    monkeypatch.setattr(fashion, "DEVELOPMENT", 50)
    groups = groups_by_name(binary_arrays(f"class {number % 10}".encode() for number in range(2_000)))
    train, development = fashion.split(groups)
    assert set(train).isdisjoint(development)
    assert np.bincount(groups.of_sample[development]).tolist() == [5] * 10
    assert sorted(np.bincount(groups.of_sample[train]))[::9] == [
        1,
        195,
    ]  # 195 left of each class, a hundredth of the last
