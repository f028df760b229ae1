"""Any picture becomes an upright RGB JPEG, or stays the JPEG that it is."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from thermopile.pipeline.conversion import images
from thermopile.pipeline.conversion.images import decodes, to_stored
from thermopile.pipeline.dataset.row_records import MAX_JPEG_BYTES
from thermopile.pipeline.errors import BadSampleError

from support.pictures import POLICY, as_bytes, chunk, draw, png


def pixels(stored):
    image = Image.open(io.BytesIO(stored.jpeg))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (stored.width, stored.height))
    return np.asarray(image).astype(int)


def difference(stored, expected):
    return np.abs(pixels(stored) - np.asarray(expected).astype(int)).mean()


@pytest.mark.parametrize("options", [{"quality": 55}, {"progressive": True}, {"subsampling": 0}, {"optimize": True}])
def test_a_jpeg_within_the_size_limit_is_kept_byte_for_byte(options):
    jpeg = as_bytes(draw(1), "JPEG", **options)
    stored = to_stored(jpeg, POLICY)
    assert stored.jpeg == jpeg
    assert (stored.height, stored.width) == (24, 32)


def test_metadata_and_what_stands_behind_the_end_are_kept_with_a_jpeg():
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 1, "a camera"
    jpeg = as_bytes(draw(1), "JPEG", exif=exif, comment=b"seen") + b"a film that the camera made meanwhile"
    assert to_stored(jpeg, POLICY).jpeg == jpeg


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "GIF", "TIFF", "TIFF tiff_lzw", "PPM"])
def test_other_formats_become_jpegs_of_the_same_picture(kind):
    kind, _, packing = kind.partition(" ")
    options = {"compression": packing} if packing else {}
    assert difference(to_stored(as_bytes(draw(2), kind, **options), POLICY), draw(2)) < 8


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "CMYK", "YCbCr"])
def test_every_colour_mode_becomes_rgb(mode):
    grey = draw(3).convert("L")
    image = (grey if mode in ("L", "1", "P", "LA") else draw(3)).convert(mode)
    stored = to_stored(as_bytes(image, "PNG" if mode not in ("CMYK", "YCbCr") else "TIFF"), POLICY)
    expected = (grey if mode in ("L", "P", "LA") else image).convert("RGB")
    assert difference(stored, expected) < (40 if mode == "1" else 8)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_deep_grey_keeps_its_brightness(kind):
    grey = draw(3).convert("L")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    assert difference(to_stored(as_bytes(deep, kind), POLICY), grey.convert("RGB")) < 2


def test_deep_rgb_keeps_its_brightness():
    deep = (np.asarray(draw(3)).astype(np.uint16) * 257).astype(">u2").reshape(24, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in deep)
    assert difference(to_stored(png(32, 24, rows, depth=16), POLICY), draw(3)) < 8


def test_floating_point_pixels_are_grey_from_zero_to_one():
    grey = draw(3).convert("L")
    floating = Image.fromarray(np.asarray(grey).astype(np.float32) / 255)
    assert difference(to_stored(as_bytes(floating, "TIFF"), POLICY), grey.convert("RGB")) < 2


@pytest.mark.parametrize(
    "values", [np.full((9, 9), 7.5, np.float32), np.full((9, 9), np.nan, np.float32), np.full((9, 9), -4, np.int32)]
)
def test_deep_pixels_whose_white_nobody_knows_are_refused(values):
    with pytest.raises(BadSampleError, match="deep pixels of unknown scale"):
        to_stored(as_bytes(Image.fromarray(values), "TIFF"), POLICY)


RAMP = np.tile(np.linspace(0, 1, 64), (48, 1))
"""From black to white."""
GREY = Image.fromarray((RAMP * 255).astype(np.uint8))


def deep(most, kind, form, **options):
    return as_bytes(Image.fromarray((RAMP * most).astype(kind)), form, **options)


def pnm(magic, most):
    return (
        f"{magic} 64 48 {most}\n".encode() + np.repeat(RAMP * most, 3 if magic == "P6" else 1).astype(">u2").tobytes()
    )


def grey_png(channels, extra=b"", depth=16):
    """channels: True for grey, False for opaque alpha."""
    most = (1 << depth) - 1
    values = np.stack([RAMP * most if is_grey else np.full_like(RAMP, most) for is_grey in channels], -1)
    rows = b"".join(b"\0" + row.tobytes() for row in values.astype(f">u{depth // 8}"))
    return png(64, 48, rows, depth=depth, colour={1: 0, 2: 4, 3: 2, 4: 6}[len(channels)], extra=extra)


def wrong_checksum(data):
    return data[:-1] + bytes([data[-1] ^ 255])


@pytest.mark.parametrize(
    "picture",
    [
        deep(4095, np.uint16, "TIFF", tiffinfo={281: 4095}),
        deep(65_535, np.int32, "TIFF"),
        deep(-65_535, np.int32, "TIFF"),
        deep(2e9, np.int32, "TIFF"),
        deep(255, np.float32, "TIFF"),
        as_bytes(GREY, "TIFF", tiffinfo={262: 0}),  # white is zero
        as_bytes(GREY.convert("RGB").convert("CMYK"), "TIFF"),
        b"Pf\n64 48\n-1.0\n" + RAMP.astype("<f4").tobytes(),
        *(pnm(*header) for header in (("P5", 4095), ("P5", 65_535), ("P6", 1023))),
        *(grey_png(channels) for channels in ([True], [True, False], [True] * 3, [True, True, True, False])),
        grey_png([True], chunk(b"tRNS", b"\xff\xff")),
        grey_png([True], chunk(b"iCCP", b"x\0\0garbage"), 8),
        grey_png([True], chunk(b"pHYs", b"\0"), 8),
        grey_png([True], wrong_checksum(chunk(b"gAMA", bytes(4))), 8),
        grey_png([True], wrong_checksum(chunk(b"tEXt", b"a\0b")), 8),
        grey_png([True], chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(80_000_000))), 8),
        as_bytes(GREY.convert("P"), "GIF", comment=b"x" * 60_000),
        as_bytes(GREY.convert("RGB"), "WEBP", exif=b"Exif\0\0garbage" * 100),
    ],
)
def test_pictures_as_pillows_own_tests_have_them_are_right_or_left_out_as_of_unknown_scale(picture):
    try:
        stored = to_stored(picture, POLICY)
    except BadSampleError as error:
        assert str(error).startswith("deep pixels of unknown scale")  # noqa: PT017
    else:
        assert difference(stored, GREY.convert("RGB")) < 4
        assert len(stored.jpeg) < 5_000


def see_through(mode):
    """Left half opaque green; the right one transparent, with black hidden below."""
    image = Image.new("RGBA", (32, 24), (0, 160, 0, 255))
    image.paste((0, 0, 0, 0), (16, 0, 32, 24))
    if mode == "LA":
        return as_bytes(image.convert("LA"), "PNG")
    if mode == "P":
        palette = Image.new("P", (32, 24), 0)
        palette.putpalette([0, 160, 0, 0, 0, 0])
        palette.paste(1, (16, 0, 32, 24))
        return as_bytes(palette, "PNG", transparency=1)
    if mode == "RGB":
        return as_bytes(image.convert("RGB"), "PNG", transparency=(0, 0, 0))
    return as_bytes(image, "WEBP" if mode == "WebP" else "PNG", **({"lossless": True} if mode == "WebP" else {}))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "WebP"])
def test_what_is_transparent_becomes_white_whatever_colour_hides_below(mode):
    seen = pixels(to_stored(see_through(mode), POLICY))
    assert seen[:, 20:].min() > 245
    assert seen[:, :12].mean() < 130


def test_half_transparent_pixels_are_mixed_with_white():
    half = Image.new("RGBA", (16, 16), (200, 0, 0, 128))
    assert np.abs(pixels(to_stored(as_bytes(half, "PNG"), POLICY)) - [227, 127, 127]).max() < 4


def ink(picture):
    """CMYK without black: what is printed to make the picture."""
    return Image.merge("CMYK", (*Image.eval(picture, lambda value: 255 - value).split(), Image.new("L", picture.size)))


def test_a_cmyk_jpeg_comes_out_in_its_colours():
    # Pillow writes it as Adobe's programs do: inverted.
    assert difference(to_stored(as_bytes(ink(draw(3)), "JPEG", quality=95), POLICY), draw(3)) < 8


def test_a_ycck_jpeg_comes_out_in_its_colours():
    # YCCK: the inverted inks as YCbCr, and an inverted K. Pillow inverts the four channels that it is given.
    luma_and_chroma = Image.eval(draw(3), lambda value: 255 - value).convert("YCbCr")
    channels = [Image.eval(channel, lambda value: 255 - value) for channel in luma_and_chroma.split()]
    jpeg = as_bytes(Image.merge("CMYK", (*channels, Image.new("L", (32, 24)))), "JPEG", quality=95)
    adobe = jpeg.index(b"Adobe")
    assert jpeg[adobe + 11] == 0
    ycck = jpeg[: adobe + 11] + b"\2" + jpeg[adobe + 12 :]
    assert difference(to_stored(ycck, POLICY), draw(3)) < 8


def test_a_jpeg_of_rgb_channels_is_encoded_again_for_decoders_that_expect_ycbcr():
    jpeg = as_bytes(draw(3), "JPEG", quality=95, keep_rgb=True)
    stored = to_stored(jpeg, POLICY)
    assert stored.jpeg != jpeg
    assert difference(stored, draw(3)) < 8


TURNS = {
    1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}  # fmt: skip
"""EXIF orientation → how the sensor's picture lies to what the photographer saw."""


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", TURNS)
def test_a_picture_that_the_camera_turned_comes_out_upright(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = draw(4) if orientation == 1 else draw(4).transpose(TURNS[orientation])
    stored = to_stored(as_bytes(turned, kind, quality=95, exif=exif), POLICY)
    assert difference(stored, draw(4)) < 8


def test_a_large_picture_that_the_camera_turned_comes_out_upright_and_reduced():
    exif = Image.Exif()
    exif[0x0112] = 6
    seen = draw(4, height=600, width=800)
    stored = to_stored(as_bytes(seen.transpose(TURNS[6]), "JPEG", quality=95, exif=exif), POLICY)
    assert difference(stored, seen.resize((85, 64))) < 8


def test_damaged_exif_does_not_cost_the_picture():
    jpeg = as_bytes(draw(4), "JPEG")
    exif = b"Exif\0\0II*\0\xff\xff\xff\x7f" + bytes(20)
    damaged = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:]
    assert to_stored(damaged, POLICY).jpeg == damaged


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})])
def test_the_first_picture_of_an_animation_is_taken(kind, options):
    film = as_bytes(draw(5), kind, save_all=True, append_images=[draw(6), draw(7)], **options)
    assert difference(to_stored(film, POLICY), draw(5)) < 8


def test_damaged_metadata_of_a_png_do_not_cost_the_picture():
    rows = b"".join(b"\0" + row.tobytes() for row in np.asarray(draw(4)))
    damaged = png(32, 24, rows, extra=chunk(b"tEXt", b"Raw profile type exif\0\nexif\n8\nno hex digits"))
    assert difference(to_stored(damaged, POLICY), draw(4)) < 8


def test_the_first_of_several_pictures_in_a_jpeg_is_taken():
    film = as_bytes(draw(5), "MPO", save_all=True, append_images=[draw(6)], quality=95)
    stored = to_stored(film, POLICY)
    assert difference(stored, draw(5)) < 8
    assert len(stored.jpeg) < len(film)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_larger_picture_is_reduced_to_the_limit_on_its_short_side(kind):
    stored = to_stored(as_bytes(draw(5, height=2000, width=1500), kind), POLICY)
    assert (stored.height, stored.width) == (85, 64)
    assert difference(stored, draw(5, height=2000, width=1500).resize((64, 85), Image.Resampling.LANCZOS)) < 8


def test_fine_detail_is_averaged_where_a_picture_is_reduced():
    noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    assert pixels(to_stored(as_bytes(Image.fromarray(noise), "PNG"), POLICY)).std() < 20  # 74 before


def test_a_jpeg_larger_than_a_page_of_the_shard_is_encoded_again():
    jpeg = as_bytes(draw(1), "JPEG") + bytes(MAX_JPEG_BYTES)
    assert len(to_stored(jpeg, POLICY).jpeg) < 10_000


def test_what_is_stored_always_decodes_with_the_decoder_that_training_uses():
    for image in (draw(7), draw(8).convert("CMYK"), draw(9, height=1, width=1), draw(10, height=3, width=900)):
        stored = to_stored(image, POLICY)
        assert decodes(*stored[:3])


def test_a_picture_drawn_here_is_not_changed():
    image = draw(7).convert("RGBA")
    before = image.tobytes()
    to_stored(image, POLICY)
    assert (image.mode, image.tobytes()) == ("RGBA", before)


def test_a_jpeg_that_only_pillow_forgives_is_encoded_again():
    # Stray bytes before the end marker: Pillow reads on, libjpeg-turbo complains.
    jpeg = as_bytes(draw(11), "JPEG")
    stray = jpeg[:-2] + bytes(7) + jpeg[-2:]
    assert not decodes(stray, 24, 32)
    stored = to_stored(stray, POLICY)
    assert stored.jpeg != stray
    assert decodes(*stored[:3])


@pytest.mark.parametrize(
    ("values", "tone"),
    [((0, 12), -1), ((0, 20), 0), ((243, 255), 1), ((230, 255), 0), ((0, 255), 0), ((99, 99), 0)],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_picture_is_nearly_black_or_white_if_nearly_all_values_are(values, tone, kind):
    pixels = np.full((40, 40, 3), values[0], np.uint8)
    pixels[:20] = values[1]
    pixels[8, :10] = 128  # less than a hundredth
    assert to_stored(as_bytes(Image.fromarray(pixels), kind, quality=100), POLICY).tone == tone


@pytest.mark.parametrize(
    ("opened", "said"),
    [
        (("JPEG", "HEIF"), "a film, or a damaged HEIC picture"),
        (("JPEG",), "a film, or a HEIC picture, which needs pip install 'thermopile[heic]'"),
    ],
)
def test_a_film_is_not_said_to_need_an_extra_that_is_there(monkeypatch, opened, said):
    monkeypatch.setattr("thermopile.pipeline.conversion.images._OPENED", opened)
    with pytest.raises(BadSampleError) as refused:
        to_stored(b"\0\0\0\x1cftypmp42" + bytes(40), POLICY)
    assert str(refused.value) == said


def test_heic_is_read_by_the_extra_and_named_without_it(monkeypatch):
    picture = b"\0\0\0\x1cftypheic" + bytes(40)
    with pytest.raises(
        BadSampleError, match=r"damaged|a film, or a HEIC picture, which needs pip install 'thermopile\[heic\]'"
    ):
        to_stored(picture, POLICY)
    pytest.importorskip("pillow_heif", reason="needs thermopile[heic]")
    heic = as_bytes(draw(4), "HEIF", quality=95)
    assert difference(to_stored(heic, POLICY), draw(4)) < 8
    monkeypatch.setattr(images, "_OPENED", images.FORMATS)
    with pytest.raises(BadSampleError, match="HEIC"):
        to_stored(heic, POLICY)
