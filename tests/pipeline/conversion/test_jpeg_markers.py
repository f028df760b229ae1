"""What a JPEG's markers say: its coding, its scans, and whether Pillow is needed to keep it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from thermopile.pipeline.conversion import images
from thermopile.pipeline.conversion.images import coding_of, decodes, to_stored
from thermopile.pipeline.errors import BadSampleError

from support.pictures import POLICY, as_bytes, draw


def test_scans_of_a_jpeg_are_counted():
    baseline, progressive = (as_bytes(draw(1), "JPEG", progressive=p) for p in (False, True))
    assert coding_of(baseline)[:2] == (True, 1)
    assert coding_of(progressive)[:2] == (True, 10)  # libjpeg's script for three channels
    assert coding_of(progressive[: progressive.rindex(b"\xff\xda")]).scans == 9
    assert coding_of(progressive + b"\0\2" + progressive).scans == 10  # another picture behind the end is not decoded


def test_scans_of_a_baseline_jpeg_are_counted_where_each_holds_one_channel():
    baseline = as_bytes(draw(1), "JPEG")
    scan = baseline.index(b"\xff\xda")
    assert baseline[scan + 4] == 3
    apart = b"\xff\xda\0\x08\1\1\0\0\x3f\0" + bytes(30)
    assert coding_of(baseline[:scan] + 5 * apart + b"\xff\xd9").scans == 5


def test_the_coded_data_of_a_single_scan_are_not_searched():
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


def test_only_a_plain_jpeg_has_its_size_read_from_its_markers():
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


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, HEADER - 1), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 3))
def test_what_the_markers_alone_decide_is_what_pillow_decides(changes, cut):
    jpeg = bytearray(as_bytes(Image.linear_gradient("L").resize((32, 24)).convert("RGB"), "JPEG"))
    assert jpeg.index(b"\xff\xda") == HEADER
    for place, value in changes:
        jpeg[place] = value
    jpeg = bytes(jpeg[: len(jpeg) - cut])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "coding_of", lambda jpeg: coding_of(jpeg)._replace(plain_size=None))
        through_pillow = stored_or_refused(jpeg)
    assert stored_or_refused(jpeg) == through_pillow


def stored_or_refused(jpeg):
    try:
        return to_stored(jpeg, POLICY)
    except BadSampleError:
        return None
