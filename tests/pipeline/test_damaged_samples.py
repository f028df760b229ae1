"""Samples that are not what conversion stored, whichever way they are read: one error that names them, never a crash,
and never other pixels or tokens."""

import json
import resource
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from thermopile.pipeline.dataset.row_records import RECORD, write_row_records
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.pipeline.views.recipes import RECIPES

from support.conversions import dataset_of
from support.programs import program

ROW, N = 5, 32


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """32 pairs, of which one is large."""
    folder = tmp_path_factory.mktemp("sound") / "dataset"
    dataset_of(GlyphSource(0), folder, selection=np.arange(0, 320, 10))
    return folder


def flipped(file, at, bit):
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.unlink()  # a link to the other format's
    file.write_bytes(data)


def in_record(**lies):
    """A lie in the row's record, whose checksums fit."""

    def lie(path, record):
        rows = path / "shards" / "shard-00000.rows"
        records = Dataset(path).shard(0).records()
        for name, value in lies.items():
            records[name][ROW] = value(record) if callable(value) else value
        rows.unlink()
        write_row_records(rows, records, (path / "shards" / "shard-00000.beton").stat().st_size)

    return lie


def flip_in_record(byte):
    return lambda path, record: flipped(path / "shards" / "shard-00000.rows", 64 * (1 + ROW) + byte, byte % 8)


def flip_in_jpeg(share):
    def flip(path, record):
        at = int(record["jpeg_at"]) + int(share * (record["jpeg_bytes"] - 1))
        flipped(path / "shards" / "shard-00000.beton", at, int(100 * share) % 8)

    return flip


def with_next_rows_record(path, record):
    file = path / "shards" / "shard-00000.rows"
    data = file.read_bytes()
    at = 64 * (1 + ROW)
    file.write_bytes(data[:at] + data[at + 64 : at + 128] + data[at + 64 :])


def cut_behind_the_header(path, record):
    file = path / "shards" / "shard-00000.beton"
    file.write_bytes(file.read_bytes()[: int(record["jpeg_at"])])


RECORDED, PICTURE = "damaged or unreadable record", "checksum of its picture"
HEADER, TOKENS = "another height or width", "tokens"
DAMAGE = {
    **{f"record, byte {byte}": (flip_in_record(byte), RECORDED) for byte in (0, 25, 63)},
    **{f"JPEG at {share}": (flip_in_jpeg(share), PICTURE) for share in (0.0, 0.03, 0.5, 1.0)},
    "the next row's record": (with_next_rows_record, RECORDED),
    "cut short": (cut_behind_the_header, "belongs to a .beton file of"),
    # The same from somebody who makes the checksums fit.
    "width 0": (in_record(width=0), RECORDED),
    "both 0": (in_record(width=0, height=0), RECORDED),
    "both 65,535": (in_record(width=65_535, height=65_535), RECORDED),
    "width 33": (in_record(width=33), HEADER),
    "JPEG of 0 bytes": (in_record(jpeg_bytes=0), RECORDED),
    "JPEG of 4 GB": (in_record(jpeg_bytes=2**32 - 1), RECORDED),
    "JPEG wraps to byte 100": (in_record(jpeg_at=lambda record: 2**64 + 100 - int(record["jpeg_bytes"])), RECORDED),
    "tokens wrap": (in_record(tokens_at=2**64 - 100), RECORDED),
    "tokens elsewhere": (in_record(tokens_at=0), TOKENS),
    "many captions": (in_record(captions=2**31), RECORDED),
    "no captions": (in_record(captions=0), RECORDED),
}


@pytest.mark.wide
def test_every_way_to_read_names_the_sample_and_none_crashes(sound, tmp_path):
    paths = {}
    for name, (damage, _) in DAMAGE.items():
        paths[name] = tmp_path / name.replace(" ", "-").replace(",", "").replace("'", "")
        shutil.copytree(sound, paths[name])
        (record,) = Dataset(sound).shard(0).records(np.array([ROW]))
        damage(paths[name], record)
    command = program("reading_damaged", *paths.values())
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = {(Path(path), way): error for path, way, error in map(json.loads, done.stdout.splitlines())}
    for name, (_, message) in DAMAGE.items():
        for way in ("ffcv", "dali", "one by one"):
            error = errors[paths[name], way]
            if message == TOKENS and way == "one by one":  # it reads no tokens
                assert error is None
                continue
            assert error is not None, (name, way)
            assert message in error, (name, way, error)
            assert "Convert the dataset again" in error
            if message in (RECORDED, PICTURE, HEADER, TOKENS):
                assert f"sample {ROW} (row {ROW} of shard 0 of {paths[name]}) " in error


def test_memory_is_not_taken_for_a_size_that_only_the_record_says(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "copy")
    in_record(height=9_000, width=9_000)(tmp_path / "copy", None)
    dataset = Dataset(tmp_path / "copy")
    order, limits = Order.create(N, N, canonical_shards=1), resource.getrlimit(resource.RLIMIT_AS)
    options = {"recipe": RECIPES["clip"], "image_size": 16, "views": 1, "workers": 1}
    with FFCVLoader(dataset, order, **options) as loader:
        loader.make(np.arange(ROW), 0)
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 9_000 * 9_000, limits[1]))
        try:
            with pytest.raises(DatasetError, match=f"sample {ROW} .*{HEADER}"):
                loader.make(np.array([ROW]), 0)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)


def test_every_flipped_bit_of_a_picture_and_of_its_record_is_found(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "copy")
    dataset, random = Dataset(tmp_path / "copy"), np.random.default_rng(0)
    (record,) = dataset.shard(0).records(np.array([ROW]))
    jpeg = (int(record["jpeg_at"]), int(record["jpeg_bytes"]))
    for suffix, (start, size) in {"beton": jpeg, "rows": (64 * (1 + ROW), 64)}.items():
        with (tmp_path / "copy" / "shards" / f"shard-00000.{suffix}").open("r+b", buffering=0) as file:
            for at in random.choice(size, 50).tolist():
                file.seek(start + at)
                (byte,) = file.read(1)
                file.seek(start + at)
                file.write(bytes([byte ^ 1 << int(random.integers(8))]))
                with pytest.raises(DatasetError, match=rf"sample {ROW} \(row {ROW} of shard 0 "):
                    dataset.jpeg(ROW)
                file.seek(start + at)
                file.write(bytes([byte]))
                dataset.jpeg(ROW)


def test_the_record_s_layout_is_what_the_format_says():
    offsets = {name: RECORD.fields[name][1] for name in RECORD.names}
    assert RECORD.itemsize == 64
    assert offsets == {
        "jpeg_at": 0, "jpeg_bytes": 8, "captions": 12, "tokens_at": 16, "height": 24, "width": 28, "source_index": 32,
        "jpeg_checksum": 40, "tokens_checksum": 48, "checksum": 56,
    }  # fmt: skip
