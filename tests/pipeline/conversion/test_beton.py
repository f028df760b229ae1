"""FFCV's file format, written by one process, and the records of its rows."""

import subprocess

import numba.typed
import numpy as np
import pytest
import torch

from thermopile.pipeline.conversion.beton import BetonRow, write_beton
from thermopile.pipeline.conversion.images import to_stored
from thermopile.pipeline.dataset.index import ImagePolicy
from thermopile.pipeline.dataset.row_records import MAX_JPEG_BYTES

from support.pictures import draw
from support.programs import program


def rows_of(count, tokens=True):
    for i in range(count):
        jpeg, height, width, *_ = to_stored(draw(i), ImagePolicy())
        yield BetonRow(jpeg, height, width, np.arange(i, i + 6, dtype=np.int32)[None] if tokens else None, 1000 - i)


@pytest.fixture
def ffcv_loader(monkeypatch):
    """FFCV's own loader, in order. Its import sets torch and numba to one thread, and compiles constants."""
    threads = torch.get_num_threads(), numba.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(numba.typed, "Dict", dict)
        from thermopile.benchmarks.ffcv_types import leave_shared_types
    torch.set_num_threads(threads[0])
    numba.set_num_threads(threads[1])
    leave_shared_types()
    return open_ffcv


def open_ffcv(path, batch_size, **pipelines):
    from ffcv.loader import Loader, OrderOption

    pipelines["source_index"] = None
    return Loader(str(path), batch_size, num_workers=1, order=OrderOption.SEQUENTIAL, pipelines=pipelines)


def test_a_shard_s_records_lead_to_what_was_written(tmp_path):
    written = list(rows_of(20))
    records = write_beton(tmp_path / "a.beton", written, max_rows=20, context_length=6)
    data = (tmp_path / "a.beton").read_bytes()
    for row, record in zip(written, records, strict=True):
        assert data[record["jpeg_at"] :][: record["jpeg_bytes"]] == row.jpeg
        assert data[record["tokens_at"] :][:24] == row.tokens.tobytes()
    np.testing.assert_array_equal(records["source_index"], [row.source_index for row in written])
    assert (records["height"] == 24).all()
    assert (records["width"] == 32).all()


def test_fewer_rows_than_announced_make_a_whole_shard(tmp_path, ffcv_loader):
    assert len(write_beton(tmp_path / "a.beton", rows_of(5), max_rows=50, context_length=6)) == 5
    assert len(ffcv_loader(tmp_path / "a.beton", 5, image=None, tokens=None).indices) == 5


def test_rows_larger_than_a_page_together_are_spread_over_pages(tmp_path):
    large = [BetonRow(bytes([i]) * (MAX_JPEG_BYTES - i), 8, 8, np.full((1, 6), i, np.int32), i) for i in range(4)]
    records = write_beton(tmp_path / "a.beton", large, max_rows=4, context_length=6)
    data = (tmp_path / "a.beton").read_bytes()
    assert [data[record["jpeg_at"] :][: record["jpeg_bytes"]] for record in records] == [row.jpeg for row in large]


def test_captions_of_a_sample_follow_each_other_also_at_the_end_of_a_page(tmp_path, ffcv_loader):
    tokens = [np.arange(6 * captions, dtype=np.int32).reshape(-1, 6) + 100 * captions for captions in (1, 3, 2)]
    # The second sample's JPEG and first caption end 24 bytes before the page does: one caption fits there, not two.
    sizes = [(1 << 20) - 24, (1 << 20) - 48, 700]
    rows = [BetonRow(bytes([row]) * sizes[row], 8, 8, tokens[row], row) for row in range(3)]
    path = tmp_path / "a.beton"
    records = write_beton(path, rows, max_rows=3, context_length=6)
    data = path.read_bytes()
    for row, record in enumerate(records):
        assert data[record["tokens_at"] :][: tokens[row].nbytes] == tokens[row].tobytes()
    assert records["jpeg_at"][1] == records["jpeg_at"][0] + (1 << 21), "the second sample begins another page"
    from ffcv.fields.decoders import NDArrayDecoder

    loader = ffcv_loader(path, 3, image=None, tokens=[NDArrayDecoder()])
    ((read,),) = list(loader)
    np.testing.assert_array_equal(read, [of_row[:1] for of_row in tokens])


def test_ffcv_itself_reads_the_shard(tmp_path, ffcv_loader):
    write_beton(tmp_path / "a.beton", rows_of(8, tokens=False), max_rows=8, context_length=None)
    from ffcv.fields.rgb_image import SimpleRGBImageDecoder

    loader = ffcv_loader(tmp_path / "a.beton", 8, image=[SimpleRGBImageDecoder()])
    ((images,),) = list(loader)
    for i in range(8):
        assert np.abs(images[i].astype(int) - np.asarray(draw(i)).astype(int)).mean() < 8


@pytest.mark.wide  # in a process of its own: in one where the type was changed before, nothing fails
def test_after_ffcv_s_own_loader_a_new_caller_of_what_was_compiled_before_is_compiled(tmp_path):
    subprocess.run(program("calling_after_ffcv", tmp_path), check=True, timeout=120)
