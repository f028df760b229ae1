"""Any picture → an upright RGB JPEG, or a reason why not."""

import io

import numpy as np
import pytest
from PIL import Image

from thermopile.pipeline.dataset import ImagePolicy
from thermopile.pipeline.errors import BadSampleError
from thermopile.pipeline.images import decodes, to_stored

POLICY = ImagePolicy(max_size=64, quality=90)


def as_bytes(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(stored):
    return np.asarray(Image.open(io.BytesIO(stored.jpeg))).astype(int)


def test_a_jpeg_within_the_size_limit_is_kept_byte_for_byte(draw):
    jpeg = as_bytes(draw(1), "JPEG", quality=55)
    stored = to_stored(jpeg, POLICY)
    assert stored.jpeg == jpeg
    assert (stored.height, stored.width) == (24, 32)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_other_formats_become_jpegs_of_the_same_picture(draw, kind):
    stored = to_stored(as_bytes(draw(2), kind), POLICY)
    assert Image.open(io.BytesIO(stored.jpeg)).format == "JPEG"
    assert np.abs(pixels(stored) - np.asarray(draw(2)).astype(int)).mean() < 8


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_every_colour_mode_becomes_rgb(draw, mode):
    grey = draw(3).convert("L")
    if mode == "I;16":
        image = Image.fromarray((np.asarray(grey).astype(np.uint16) * 257).astype(np.uint16))
    else:
        image = (grey if mode in ("L", "1", "P", "LA") else draw(3)).convert(mode)
    stored = to_stored(as_bytes(image, "PNG" if mode not in ("CMYK", "YCbCr") else "TIFF"), POLICY)
    expected = np.asarray((grey if mode in ("L", "P", "LA", "I;16") else image).convert("RGB")).astype(int)
    assert pixels(stored).shape == (24, 32, 3)
    assert np.abs(pixels(stored) - expected).mean() < (40 if mode == "1" else 8)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_picture_that_the_camera_turned_comes_out_upright(draw, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    turned = draw(4).transpose(turns[orientation])
    stored = to_stored(as_bytes(turned, "JPEG", quality=95, exif=exif), POLICY)
    assert (stored.height, stored.width) == (24, 32)
    assert np.abs(pixels(stored) - np.asarray(draw(4)).astype(int)).mean() < 8


def test_a_larger_picture_is_reduced_to_the_limit_on_its_short_side(draw):
    stored = to_stored(as_bytes(draw(5, height=200, width=150), "PNG"), POLICY)
    assert (stored.height, stored.width) == (85, 64)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"<html>404</html>", "cannot identify"),
        (b"\xff\xd8\xff" + bytes(99), "cannot identify|Unsupported"),
    ],
)
def test_what_is_no_picture_is_refused_with_the_reason(data, reason):
    with pytest.raises(BadSampleError, match=reason):
        to_stored(data, POLICY)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.9])
def test_a_picture_cut_short_is_refused(draw, kind, share):
    whole = as_bytes(draw(6, height=60, width=60), kind)
    with pytest.raises(BadSampleError):
        to_stored(whole[: int(len(whole) * share)], POLICY)


def test_a_decompression_bomb_is_refused_before_it_is_unpacked():
    bomb = as_bytes(Image.new("1", (20_000, 20_000)), "PNG")
    assert len(bomb) < 100_000
    with pytest.raises(BadSampleError, match="too many pixels"):
        to_stored(bomb, POLICY)


def test_what_is_stored_always_decodes_with_the_decoder_that_training_uses(draw):
    for image in (draw(7), draw(8).convert("CMYK"), draw(9, height=1, width=1), draw(10, height=3, width=900)):
        stored = to_stored(image, POLICY)
        assert decodes(*stored)


def test_a_jpeg_that_only_pillow_forgives_is_encoded_again(draw):
    # Stray bytes before the end marker: Pillow reads on, libjpeg-turbo complains.
    jpeg = as_bytes(draw(11), "JPEG")
    stray = jpeg[:-2] + bytes(7) + jpeg[-2:]
    assert not decodes(stray, 24, 32)
    stored = to_stored(stray, POLICY)
    assert stored.jpeg != stray
    assert decodes(*stored)
