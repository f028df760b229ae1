"""FFCV's file format, written by one process and read through a memory map."""

import numpy as np
import pytest
from ffcv.fields.rgb_image import SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption

from thermopile.pipeline.beton import MAX_JPEG_BYTES, Beton, BetonRow, write_beton
from thermopile.pipeline.dataset import ImagePolicy
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.images import to_stored


def rows_of(draw, count, tokens=True):
    for i in range(count):
        jpeg, height, width = to_stored(draw(i), ImagePolicy())
        yield BetonRow(jpeg, height, width, np.arange(i, i + 6, dtype=np.int32) if tokens else None, 1000 - i)


def test_a_shard_gives_back_what_was_written(tmp_path, draw):
    written = list(rows_of(draw, 20))
    assert write_beton(tmp_path / "a.beton", written, most_rows=20, context_length=6) == 20
    beton = Beton(tmp_path / "a.beton")
    assert len(beton) == 20
    assert [beton.jpeg(i) for i in range(20)] == [row.jpeg for row in written]
    np.testing.assert_array_equal(beton.tokens(np.array([3, 0, 3])), [written[i].tokens for i in (3, 0, 3)])
    np.testing.assert_array_equal(beton.source_index, [row.source_index for row in written])
    assert (beton.heights == 24).all()
    assert (beton.widths == 32).all()


def test_fewer_rows_than_announced_make_a_whole_shard(tmp_path, draw):
    assert write_beton(tmp_path / "a.beton", rows_of(draw, 5), most_rows=50, context_length=6) == 5
    assert len(Beton(tmp_path / "a.beton")) == 5


def test_rows_larger_than_a_page_together_are_spread_over_pages(tmp_path):
    large = [BetonRow(bytes([i]) * (MAX_JPEG_BYTES - i), 8, 8, np.full(6, i, np.int32), i) for i in range(4)]
    write_beton(tmp_path / "a.beton", large, most_rows=4, context_length=6)
    beton = Beton(tmp_path / "a.beton")
    assert [beton.jpeg(i) for i in range(4)] == [row.jpeg for row in large]
    np.testing.assert_array_equal(beton.tokens(np.arange(4))[:, 0], np.arange(4))


def test_ffcv_itself_reads_the_shard(tmp_path, draw):
    write_beton(tmp_path / "a.beton", rows_of(draw, 8, tokens=False), most_rows=8, context_length=None)
    loader = Loader(
        str(tmp_path / "a.beton"), batch_size=8, num_workers=1, order=OrderOption.SEQUENTIAL,
        pipelines={"image": [SimpleRGBImageDecoder()], "source_index": None},
    )  # fmt: skip
    ((images,),) = list(loader)
    for i in range(8):
        assert np.abs(images[i].astype(int) - np.asarray(draw(i)).astype(int)).mean() < 8


def test_a_row_that_fails_leaves_no_shared_memory_and_no_whole_file(tmp_path, draw):
    def rows():
        yield from rows_of(draw, 3)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_beton(tmp_path / "a.beton", rows(), most_rows=9, context_length=6)
    with pytest.raises(DatasetError, match="Convert the dataset again"):
        Beton(tmp_path / "a.beton")


@pytest.mark.parametrize("keep", [0, 10, 3000, 2_000_000, 2_097_160, 2_100_000])
def test_a_shard_cut_short_is_refused(tmp_path, draw, keep):
    path = tmp_path / "a.beton"
    write_beton(path, rows_of(draw, 20), most_rows=20, context_length=6)
    assert keep < path.stat().st_size
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DatasetError, match="Convert the dataset again"):
        Beton(path)
