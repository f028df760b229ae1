"""Any picture → an upright RGB JPEG, or a reason why not."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from thermopile.pipeline.conversion import images
from thermopile.pipeline.conversion.images import MAX_PIXELS, decodes, to_stored
from thermopile.pipeline.conversion.jpeg_markers import coding_of
from thermopile.pipeline.dataset_index import ImagePolicy
from thermopile.pipeline.errors import BadSampleError
from thermopile.pipeline.row_records import MAX_JPEG_BYTES

POLICY = ImagePolicy(max_size=64, quality=90)


def as_bytes(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(stored):
    image = Image.open(io.BytesIO(stored.jpeg))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (stored.width, stored.height))
    return np.asarray(image).astype(int)


def difference(stored, expected):
    return np.abs(pixels(stored) - np.asarray(expected).astype(int)).mean()


@pytest.mark.parametrize("options", [{"quality": 55}, {"progressive": True}, {"subsampling": 0}, {"optimize": True}])
def test_a_jpeg_within_the_size_limit_is_kept_byte_for_byte(draw, options):
    jpeg = as_bytes(draw(1), "JPEG", **options)
    stored = to_stored(jpeg, POLICY)
    assert stored.jpeg == jpeg
    assert (stored.height, stored.width) == (24, 32)


def test_metadata_and_what_stands_behind_the_end_are_kept_with_a_jpeg(draw):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 1, "a camera"
    jpeg = as_bytes(draw(1), "JPEG", exif=exif, comment=b"seen") + b"a film that the camera made meanwhile"
    assert to_stored(jpeg, POLICY).jpeg == jpeg


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_other_formats_become_jpegs_of_the_same_picture(draw, kind):
    assert difference(to_stored(as_bytes(draw(2), kind), POLICY), draw(2)) < 8


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "CMYK", "YCbCr"])
def test_every_colour_mode_becomes_rgb(draw, mode):
    grey = draw(3).convert("L")
    image = (grey if mode in ("L", "1", "P", "LA") else draw(3)).convert(mode)
    stored = to_stored(as_bytes(image, "PNG" if mode not in ("CMYK", "YCbCr") else "TIFF"), POLICY)
    expected = (grey if mode in ("L", "P", "LA") else image).convert("RGB")
    assert difference(stored, expected) < (40 if mode == "1" else 8)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, rows, *, depth=8, colour=2, extra=b""):
    """A PNG from its raw rows; Pillow writes neither every depth nor every chunk."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_deep_grey_keeps_its_brightness(draw, kind):
    grey = draw(3).convert("L")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    assert difference(to_stored(as_bytes(deep, kind), POLICY), grey.convert("RGB")) < 2


def test_deep_rgb_keeps_its_brightness(draw):
    deep = (np.asarray(draw(3)).astype(np.uint16) * 257).astype(">u2").reshape(24, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in deep)
    assert difference(to_stored(png(32, 24, rows, depth=16), POLICY), draw(3)) < 8


def test_floating_point_pixels_are_grey_from_zero_to_one(draw):
    grey = draw(3).convert("L")
    floating = Image.fromarray(np.asarray(grey).astype(np.float32) / 255)
    assert difference(to_stored(as_bytes(floating, "TIFF"), POLICY), grey.convert("RGB")) < 2


@pytest.mark.parametrize(
    "values", [np.full((9, 9), 7.5, np.float32), np.full((9, 9), np.nan, np.float32), np.full((9, 9), -4, np.int32)]
)
def test_deep_pixels_whose_white_nobody_knows_are_refused(values):
    with pytest.raises(BadSampleError, match="deep pixels of unknown scale"):
        to_stored(as_bytes(Image.fromarray(values), "TIFF"), POLICY)


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


def test_a_cmyk_jpeg_comes_out_in_its_colours(draw):
    # Pillow writes it as Adobe's programs do: inverted.
    assert difference(to_stored(as_bytes(ink(draw(3)), "JPEG", quality=95), POLICY), draw(3)) < 8


def test_a_ycck_jpeg_comes_out_in_its_colours(draw):
    # YCCK: the inverted inks as YCbCr, and an inverted K. Pillow inverts the four channels that it is given.
    luma_and_chroma = Image.eval(draw(3), lambda value: 255 - value).convert("YCbCr")
    channels = [Image.eval(channel, lambda value: 255 - value) for channel in luma_and_chroma.split()]
    jpeg = as_bytes(Image.merge("CMYK", (*channels, Image.new("L", (32, 24)))), "JPEG", quality=95)
    adobe = jpeg.index(b"Adobe")
    assert jpeg[adobe + 11] == 0
    ycck = jpeg[: adobe + 11] + b"\2" + jpeg[adobe + 12 :]
    assert difference(to_stored(ycck, POLICY), draw(3)) < 8


def test_a_jpeg_whose_channels_are_rgb_is_encoded_again_for_decoders_that_take_them_for_ycbcr(draw):
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
def test_a_picture_that_the_camera_turned_comes_out_upright(draw, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = draw(4) if orientation == 1 else draw(4).transpose(TURNS[orientation])
    stored = to_stored(as_bytes(turned, kind, quality=95, exif=exif), POLICY)
    assert difference(stored, draw(4)) < 8


def test_a_large_picture_that_the_camera_turned_comes_out_upright_and_reduced(draw):
    exif = Image.Exif()
    exif[0x0112] = 6
    seen = draw(4, height=600, width=800)
    stored = to_stored(as_bytes(seen.transpose(TURNS[6]), "JPEG", quality=95, exif=exif), POLICY)
    assert difference(stored, seen.resize((85, 64))) < 8


def test_damaged_exif_does_not_cost_the_picture(draw):
    jpeg = as_bytes(draw(4), "JPEG")
    exif = b"Exif\0\0II*\0\xff\xff\xff\x7f" + bytes(20)
    damaged = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:]
    assert to_stored(damaged, POLICY).jpeg == damaged


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})])
def test_of_an_animation_the_first_picture_is_taken(draw, kind, options):
    film = as_bytes(draw(5), kind, save_all=True, append_images=[draw(6), draw(7)], **options)
    assert difference(to_stored(film, POLICY), draw(5)) < 8


def test_damaged_metadata_of_a_png_do_not_cost_the_picture(draw):
    rows = b"".join(b"\0" + row.tobytes() for row in np.asarray(draw(4)))
    damaged = png(32, 24, rows, extra=chunk(b"tEXt", b"Raw profile type exif\0\nexif\n8\nno hex digits"))
    assert difference(to_stored(damaged, POLICY), draw(4)) < 8


def test_of_a_jpeg_with_several_pictures_the_first_is_taken(draw):
    film = as_bytes(draw(5), "MPO", save_all=True, append_images=[draw(6)], quality=95)
    stored = to_stored(film, POLICY)
    assert difference(stored, draw(5)) < 8
    assert len(stored.jpeg) < len(film)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_larger_picture_is_reduced_to_the_limit_on_its_short_side(draw, kind):
    stored = to_stored(as_bytes(draw(5, height=2000, width=1500), kind), POLICY)
    assert (stored.height, stored.width) == (85, 64)
    assert difference(stored, draw(5, height=2000, width=1500).resize((64, 85), Image.Resampling.LANCZOS)) < 8


def test_fine_detail_is_averaged_where_a_picture_is_reduced():
    noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    assert pixels(to_stored(as_bytes(Image.fromarray(noise), "PNG"), POLICY)).std() < 20  # 74 before


def test_a_jpeg_larger_than_a_page_of_the_shard_is_encoded_again(draw):
    jpeg = as_bytes(draw(1), "JPEG") + bytes(MAX_JPEG_BYTES)
    assert len(to_stored(jpeg, POLICY).jpeg) < 10_000


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
    ],
)
def test_what_is_no_picture_is_refused_with_the_reason(data, reason):
    with pytest.raises(BadSampleError, match=reason):
        to_stored(data, POLICY)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.95])
def test_a_picture_cut_short_is_refused(draw, kind, share):
    whole = as_bytes(draw(6, height=60, width=60), kind)
    with pytest.raises(BadSampleError):
        to_stored(whole[: int(len(whole) * share)], POLICY)


@pytest.mark.parametrize("end", [1, 2, 3, 20])
def test_a_jpeg_without_its_last_bytes_is_refused(draw, end):
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
    unpacks_to_much = zlib.compress(bytes(50_000_000), 9)
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
        "text": (png(1, 1, bytes(4), extra=chunk(b"zTXt", b"a\0\0" + unpacks_to_much)), "too large"),
        "profile": (png(1, 1, bytes(4), extra=chunk(b"iCCP", b"a\0\0" + unpacks_to_much)), "too large"),
        "scans": (jpeg[:-2] + 1000 * scan + b"\xff\xd9", "a bomb: more than 100 scans"),
        "segments": (jpeg[:2] + 20_000 * b"\xff\xfe\0\2" + jpeg[2:], "a bomb: more than 10,000 segments"),
        "filling": (jpeg[:2] + bytes([255]) * 1_000_000 + jpeg[2:], "a bomb: more than 1,000 bytes between"),
    }  # fmt: skip


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


def test_tags_that_all_claim_the_whole_file_are_read_once_at_most():
    # 3,000 tags of a megabyte each would be 3 GB; Pillow stops at the size of the file.
    claims_all = tiff(*((1000 + i, 7, 1_000_000, 200) for i in range(3000)), data=bytes(1_000_000))
    assert to_stored(claims_all, POLICY)[1:] == (10, 10)


def test_a_tiff_whose_directories_form_a_circle_is_read_once():
    circle = tiff((34665, 4, 1, 8), (330, 4, 1, 8), data=bytes(300))
    at = 8 + 2 + 12 * 10
    assert to_stored(circle[:at] + struct.pack("<I", 8) + circle[at + 4 :], POLICY)[1:] == (10, 10)


def test_a_picture_too_long_for_a_jpeg_is_refused():
    with pytest.raises(BadSampleError, match=r"too long: 66000×1 pixels"):
        to_stored(as_bytes(Image.new("RGB", (66_000, 1)), "PNG"), POLICY)


def test_what_is_stored_always_decodes_with_the_decoder_that_training_uses(draw):
    for image in (draw(7), draw(8).convert("CMYK"), draw(9, height=1, width=1), draw(10, height=3, width=900)):
        stored = to_stored(image, POLICY)
        assert decodes(*stored)


def test_a_picture_drawn_here_is_not_changed(draw):
    image = draw(7).convert("RGBA")
    before = image.tobytes()
    to_stored(image, POLICY)
    assert (image.mode, image.tobytes()) == ("RGBA", before)


def test_a_jpeg_that_only_pillow_forgives_is_encoded_again(draw):
    # Stray bytes before the end marker: Pillow reads on, libjpeg-turbo complains.
    jpeg = as_bytes(draw(11), "JPEG")
    stray = jpeg[:-2] + bytes(7) + jpeg[-2:]
    assert not decodes(stray, 24, 32)
    stored = to_stored(stray, POLICY)
    assert stored.jpeg != stray
    assert decodes(*stored)


def test_scans_of_a_jpeg_are_counted(draw):
    baseline, progressive = (as_bytes(draw(1), "JPEG", progressive=p) for p in (False, True))
    assert coding_of(baseline)[:2] == (True, 1)
    assert coding_of(progressive)[:2] == (True, 10)  # libjpeg's script for three channels
    assert coding_of(progressive[: progressive.rindex(b"\xff\xda")]).scans == 9
    assert coding_of(progressive + b"\0\2" + progressive).scans == 10  # another picture behind the end is not decoded


def test_scans_of_a_baseline_jpeg_are_counted_where_each_holds_one_channel(draw):
    baseline = as_bytes(draw(1), "JPEG")
    scan = baseline.index(b"\xff\xda")
    assert baseline[scan + 4] == 3
    apart = b"\xff\xda\0\x08\1\1\0\0\x3f\0" + bytes(30)
    assert coding_of(baseline[:scan] + 5 * apart + b"\xff\xd9").scans == 5


def test_the_coded_data_of_a_single_scan_are_not_searched(draw):
    jpeg = as_bytes(draw(1), "JPEG")
    assert coding_of(jpeg[:-2] + 500 * jpeg[jpeg.index(b"\xff\xda") :])[:2] == (True, 1)


# 16×16 pixels, red beside blue, by libjpeg-turbo 2.1.5 with TJ_ARITHMETIC=1.
ARITHMETIC = """
ffd8ffe000104a46494600010100000100010000ffdb004300100b0c0e0c0a100e0d0e1211101318281a181616183123251d283a333d3c39333837
40485c4e404457453738506d51575f626768673e4d71797064785c656763ffdb0043011112121815182f1a1a2f6342384263636363636363636363
63636363636363636363636363636363636363636363636363636363636363636363636363636363ffc90011080010001003011100021101031101
ffcc000a0010100501101105ffda000c03010002110311003f00fed3901b30d2085d3b3504b507ed7e38ffd9"""


def test_an_arithmetic_coded_jpeg_is_encoded_again_for_decoders_that_lack_it():
    arithmetic = bytes.fromhex("".join(ARITHMETIC.split()))
    assert decodes(arithmetic, 16, 16)
    assert coding_of(arithmetic) == (False, 1, None)
    stored = to_stored(arithmetic, POLICY)
    assert stored.jpeg != arithmetic
    assert coding_of(stored.jpeg).is_huffman


def test_a_plain_jpegs_size_is_told_by_its_markers_and_nothing_elses(draw):
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = as_bytes(draw(1), "JPEG", comment=b"seen")
    others = {
        "progressive": as_bytes(draw(1), "JPEG", progressive=True),
        "turned by the camera": as_bytes(draw(1), "JPEG", exif=exif),
        "of Adobe": as_bytes(draw(1).convert("CMYK"), "JPEG"),
        "with a profile": as_bytes(draw(1), "JPEG", icc_profile=b"a profile"),
        "grey": as_bytes(draw(1).convert("L"), "JPEG"),
        "of RGB": as_bytes(draw(1), "JPEG", keep_rgb=True),
        "with filling": plain[:2] + b"\xff" + plain[2:],
        "with a marker that Pillow does not know": plain[:2] + b"\xff\x01" + plain[2:],
        "with a start too short for Pillow": plain[:2] + b"\xff\xe0\x00\x07JFIF\x00" + plain[20:],
    }
    assert coding_of(plain).plain_size == (24, 32)
    assert {name: coding_of(jpeg).plain_size for name, jpeg in others.items()} == dict.fromkeys(others)


HEADER = 609
"""Bytes before the coded data of a small JPEG of Pillow's."""


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, HEADER - 1), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 3))
def test_what_the_markers_alone_decide_is_what_pillow_decides(changes, cut):
    jpeg = bytearray(as_bytes(Image.linear_gradient("L").resize((32, 24)).convert("RGB"), "JPEG"))
    assert jpeg.index(b"\xff\xda") == HEADER
    for place, value in changes:
        jpeg[place] = value
    jpeg = bytes(jpeg[: len(jpeg) - cut])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_kept_plain", lambda *arguments: None)
        through_pillow = stored_or_refused(jpeg)
    assert stored_or_refused(jpeg) == through_pillow


def stored_or_refused(jpeg):
    try:
        return to_stored(jpeg, POLICY)
    except BadSampleError:
        return None
