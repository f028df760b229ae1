"""Files that are not pictures, are damaged, or are bombs: each is refused with a reason."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from thermopile.pipeline.conversion.images import MAX_PIXELS, to_stored
from thermopile.pipeline.dataset.index import ImagePolicy
from thermopile.pipeline.errors import BadSampleError

from support.pictures import POLICY, as_bytes, chunk, draw, png


def test_a_picture_that_fits_no_page_of_the_shard_is_refused_with_the_cure():
    noise = np.random.default_rng(0).integers(0, 256, (1300, 1300, 3), dtype=np.uint8)
    with pytest.raises(BadSampleError, match=r"too large: .* a smaller --max-size fits"):
        to_stored(Image.fromarray(noise), ImagePolicy(max_size=2000, quality=100))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"\n<!DOCTYPE html><html>404</html>", "a page of HTML"),
        (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b"\0\0\0\x20ftypavif" + bytes(50), "AVIF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "a PostScript document"),
        (b"%PDF-1.7\n", "a PDF document"),
        (b"caption: a dog", "not a JPEG"),
        (b"\xff\xd8\xff" + bytes(99), "its start is damaged"),
        (bytes(5000), "not a JPEG"),
        (b"#!/bin/sh\nrm -rf /\n", "a script"),
        (b"\xff\xd8\xff" + random.Random(1).randbytes(9999), "damaged|a bomb"),
    ],
)
def test_a_file_that_is_not_a_picture_is_refused_with_the_reason(data, reason):
    with pytest.raises(BadSampleError, match=reason):
        to_stored(data, POLICY)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.95])
def test_a_picture_cut_short_is_refused(kind, share):
    whole = as_bytes(draw(6, height=60, width=60), kind)
    with pytest.raises(BadSampleError, match="damaged"):
        to_stored(whole[: int(len(whole) * share)], POLICY)


@pytest.mark.parametrize("end", [1, 2, 3, 20])
def test_a_jpeg_without_its_last_bytes_is_refused(end):
    with pytest.raises(BadSampleError, match="truncated"):
        to_stored(as_bytes(draw(6, height=60, width=60), "JPEG")[:-end], POLICY)


def test_a_reason_is_the_same_every_time():
    reasons = set()
    for _ in range(2):
        with pytest.raises(BadSampleError) as error:
            to_stored(b"\xff\xd8\xff" + bytes(99), POLICY)
        reasons.add(str(error.value))
    assert len(reasons) == 1


def claims(height, width):
    """A JPEG of few bytes that says that it is large."""
    jpeg = as_bytes(Image.new("RGB", (16, 16)), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + struct.pack(">HH", height, width) + jpeg[at + 4 :]


def bombs():
    jpeg = as_bytes(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return {
        "png": (png(20_000, 20_000, b""), "too many pixels"),
        "png just above": (png(MAX_PIXELS // 9000 + 1, 9000, b""), r"too many pixels: 9943×9000"),
        "jpeg": (claims(65_500, 65_500), "too many pixels"),
        "gif": (b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"\x2c" + bytes(10), "too many pixels"),
        "ppm": (b"P6 99999999 99999999 255\n", "too many pixels"),
        "webp": (b"RIFF\x1e\0\0\0WEBPVP8X\x0a" + bytes(7) + b"\xff\x3f\0\xff\x3f\0VP8L\5\0\0\0\x2f\xff\xff\xff\x0f",
                 "too many pixels"),
        "tiff": (tiff((256, 4, 1, 2**31), (257, 4, 1, 2**31)), "too many pixels"),
        "scans": (jpeg[:-2] + 1000 * scan + b"\xff\xd9", "a bomb: more than 100 scans"),
        "segments": (jpeg[:2] + 20_000 * b"\xff\xfe\0\2" + jpeg[2:], "a bomb: more than 10,000 segments"),
        "filling": (jpeg[:2] + bytes([255]) * 1_000_000 + jpeg[2:], "a bomb: more than 1,000 bytes between"),
    }  # fmt: skip


@pytest.mark.wide
def test_the_limit_of_pixels_can_be_raised_and_lowered():
    picture = as_bytes(Image.new("RGB", (9500, 9500)), "PNG")
    with pytest.raises(BadSampleError, match=r"^too many pixels: 9500×9500, above --max-pixels 89,478,485$"):
        to_stored(picture, POLICY)
    large = POLICY.model_copy(update={"max_pixels": 100_000_000})
    assert (to_stored(picture, large).height, large.model_dump()["max_pixels"]) == (POLICY.max_size, 100_000_000)
    for kind in ("PNG", "JPEG"):  # a JPEG could be kept as it is
        with pytest.raises(BadSampleError, match="11×10, above --max-pixels 100"):
            to_stored(as_bytes(Image.new("RGB", (11, 10)), kind), POLICY.model_copy(update={"max_pixels": 100}))
    assert "max_pixels" not in POLICY.model_dump()


def test_a_picture_that_stays_above_what_a_dataset_holds_names_the_option_that_reduces_it(monkeypatch):
    monkeypatch.setattr("thermopile.pipeline.conversion.images.MAX_PIXELS", 100)
    with pytest.raises(BadSampleError, match=r"too large: 11×10 pixels, above 100; a smaller --max-size fits"):
        to_stored(as_bytes(Image.new("RGB", (11, 10)), "PNG"), POLICY.model_copy(update={"max_pixels": 200}))


def tiff(*entries, data=b""):
    """A TIFF of 8-bit grey with these entries (tag, type, count, value) before the necessary ones."""
    given = {entry[0] for entry in entries}
    needed = [(256, 4, 1, 10), (257, 4, 1, 10), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8),
              (278, 4, 1, 10), (279, 4, 1, 100)]  # fmt: skip
    table = [*entries, *(entry for entry in needed if entry[0] not in given)]
    listed = b"".join(struct.pack("<HHII", *entry) for entry in table)
    return struct.pack("<2sHIH", b"II", 42, 8, len(table)) + listed + bytes(4) + data


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_is_refused_before_it_is_unpacked(name):
    data, reason = bombs()[name]
    assert len(data) < 1_100_000
    with pytest.raises(BadSampleError, match=reason):
        to_stored(data, POLICY)


@pytest.mark.parametrize("name", [b"zTXt", b"iCCP"])
def test_texts_and_profiles_that_unpack_to_much_or_are_damaged_are_left_out_of_a_sound_picture(name):
    for data in (b"a\0\0" + zlib.compress(bytes(50_000_000), 9), b"a", b"a\0\0damaged"):
        whole = chunk(name, data)
        for extra in (whole, whole[:-4] + b"sum!"):
            assert to_stored(png(1, 1, bytes(4), extra=extra), POLICY)[1:3] == (1, 1)


def test_a_comment_is_not_carried_into_the_jpeg():
    plain, commented = (as_bytes(Image.new("P", (64, 48)), "GIF", **more) for more in ({}, {"comment": b"x" * 65_534}))
    assert to_stored(commented, POLICY).jpeg == to_stored(plain, POLICY).jpeg


def ramp(kind, values, **more):
    """The first and last pixel of a row of 256 grey values, as stored."""
    image = Image.fromarray(np.tile(np.asarray(values), (8, 1)))
    stored = np.asarray(Image.open(io.BytesIO(to_stored(as_bytes(image, kind, **more), POLICY).jpeg)))
    return stored[0, 0, 0], stored[0, -1, 0]


DEEP = np.arange(256, dtype=np.uint16) * 257


def test_deep_pixels_are_scaled_by_the_white_that_the_file_names():
    assert ramp("TIFF", DEEP) == (0, 255)
    assert ramp("TIFF", DEEP, tiffinfo={262: 0}) == (255, 0)  # TIFF 6.0: 0 is imaged as white
    assert ramp("TIFF", DEEP // 16, tiffinfo={281: 4095}) == (0, 255)
    assert ramp("TIFF", np.linspace(0, 1, 256, dtype=np.float32)) == (0, 255)
    assert ramp("PNG", DEEP // 16) == (0, 16)  # a PNG's white is 65,535, whatever is used of it


@pytest.mark.parametrize(
    "values",
    [DEEP // 16, DEEP.astype(np.int32) * 7, -DEEP.astype(np.int32), np.float32([7.5] * 9), np.float32([np.nan] * 9)],
)
def test_deep_pixels_of_unknown_scale_are_left_out(values):
    with pytest.raises(BadSampleError, match="deep pixels of unknown scale"):
        ramp("TIFF", values)


def test_a_fourth_channel_without_a_meaning_and_an_alpha_of_zero_everywhere_hide_nothing():
    pixels = np.full((8, 8, 4), (200, 100, 50, 0), np.uint8)
    masks = struct.pack("<4I", 0xFF, 0xFF00, 0xFF0000, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII", 108, 8, 8, 1, 32, 3, 256, 0, 0, 0, 0) + masks + bytes(52)
    v4 = b"BM" + struct.pack("<IHHI", 14 + 108 + 256, 0, 0, 14 + 108) + header + pixels.tobytes()
    bands = as_bytes(Image.fromarray(pixels), "TIFF", tiffinfo={338: ()})
    assert Image.open(io.BytesIO(v4)).mode == "RGBA"
    for data in (v4, bands):
        stored = np.asarray(Image.open(io.BytesIO(to_stored(data, POLICY).jpeg)))
        assert np.abs(stored[0, 0].astype(int) - (200, 100, 50)).max() < 4


def test_tags_that_all_claim_the_whole_file_are_read_once_at_most():
    # 3,000 tags of a megabyte each would be 3 GB; Pillow stops at the size of the file.
    claims_all = tiff(*((1000 + i, 7, 1_000_000, 200) for i in range(3000)), data=bytes(1_000_000))
    assert to_stored(claims_all, POLICY)[1:3] == (10, 10)


def test_a_tiff_whose_directories_form_a_circle_is_read_once():
    circle = tiff((34665, 4, 1, 8), (330, 4, 1, 8), data=bytes(300))
    at = 8 + 2 + 12 * 10
    assert to_stored(circle[:at] + struct.pack("<I", 8) + circle[at + 4 :], POLICY)[1:3] == (10, 10)


def test_a_picture_too_long_for_a_jpeg_is_refused():
    with pytest.raises(BadSampleError, match=r"too long: 66000×1 pixels"):
        to_stored(as_bytes(Image.new("RGB", (66_000, 1)), "PNG"), POLICY)
