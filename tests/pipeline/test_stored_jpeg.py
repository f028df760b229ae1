"""One picture of a shard, read without FFCV, beside what FFCV's own reader finds there."""

import subprocess
import sys

import numpy as np
import pytest

from thermopile.pipeline.beton import MAX_JPEG_BYTES, Beton, BetonRow, write_beton
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.stored_jpeg import read_jpeg

ROWS = 4


@pytest.fixture
def shard(tmp_path):
    """A shard of four rows, each of which takes most of a page."""
    jpegs = [bytes([i]) * (MAX_JPEG_BYTES - i) for i in range(ROWS)]
    rows = [BetonRow(jpeg, 8, 8, np.full(6, i, np.int32), i) for i, jpeg in enumerate(jpegs)]
    write_beton(tmp_path / "a.beton", rows, most_rows=ROWS, context_length=6)
    return tmp_path / "a.beton"


@pytest.mark.parametrize("name", ["pairs_dataset", "images_dataset"])
def test_every_picture_is_the_one_that_ffcv_finds(name, request):
    dataset = request.getfixturevalue(name)
    assert [dataset.jpeg(i) for i in range(dataset.n)] == [
        dataset.beton(shard).jpeg(row)
        for shard in range(dataset.shards)
        for row in range(dataset.first_id[shard + 1] - dataset.first_id[shard])
    ]


def test_pictures_of_several_pages_are_found(shard):
    assert [read_jpeg(shard, row, ROWS) for row in range(ROWS)] == [Beton(shard).jpeg(row) for row in range(ROWS)]


def test_a_shard_of_another_number_of_rows_is_refused(shard):
    with pytest.raises(DatasetError, match=r"holds 4 rows, but dataset\.json says 5"):
        read_jpeg(shard, 0, 5)


@pytest.mark.parametrize("bytes_left", [0, 10, 2000, 1 << 22])
def test_a_shard_that_is_cut_short_is_refused(shard, bytes_left):
    with shard.open("r+b") as file:
        file.truncate(bytes_left)
    with pytest.raises(DatasetError, match=r"a\.beton (is not a readable FFCV file|was not written to its end)"):
        read_jpeg(shard, 1, ROWS)


@pytest.mark.parametrize(
    "overwritten", [range(0, 2), range(2, 4), range(16, 24), range(24 + 3 * 1041, 24 + 3 * 1041 + 32)]
)
def test_damage_of_what_leads_to_a_picture_is_named(shard, overwritten):
    data = bytearray(shard.read_bytes())
    data[overwritten.start : overwritten.stop] = b"\xff" * len(overwritten)
    shard.write_bytes(data)
    with pytest.raises(DatasetError, match=r"a\.beton"):
        read_jpeg(shard, 0, ROWS)


def test_a_picture_is_read_without_loading_ffcv_or_torch(pairs_dataset):
    code = ("import sys; from pathlib import Path; from thermopile.pipeline.dataset import Dataset; "
            "Dataset(Path(sys.argv[1])).jpeg(7); assert not {'ffcv', 'torch', 'numba'} & set(sys.modules)")  # fmt: skip
    subprocess.run([sys.executable, "-c", code, str(pairs_dataset.path)], check=True)
