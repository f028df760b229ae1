"""The size in a JPEG's header: Pillow's for what is whole, none for what is cut, and never a byte beyond the end."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from thermopile.pipeline.dataset.stored_sample import size_in_header

from support.pictures import draw


def size_of(data):
    return size_in_header(np.frombuffer(bytes(data), np.uint8))


def jpeg(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"comment": b"\xff\xc0\0\0"}, {"exif": b"Exif\0\0" + bytes(9)}]
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_the_size_is_pillow_s(mode, options):
    data = jpeg(draw(0, height=37, width=300).convert(mode), **options)
    assert Image.open(io.BytesIO(data)).size == (300, 37)
    assert size_of(data) == (37, 300)


def test_every_cut_before_the_frame_s_end_has_no_size():
    data = jpeg(draw(0))
    frame = data.index(b"\xff\xc0")
    assert {size_of(data[:length]) for length in range(frame + 9)} == {(0, 0)}


def test_fill_bytes_and_markers_without_a_length_are_passed_over():
    data = jpeg(draw(0))
    assert size_of(data[:2] + b"\xff\xff\x01\xff\xd0" + b"\xff" * 9 + data[2:]) == (24, 32)


@pytest.mark.parametrize("marker", [b"\xff\xd8", b"\xff\xd9", b"\xff\xda", b"\xff\xe0\0\1"])
def test_a_picture_a_scan_or_an_end_before_the_frame_leaves_no_size(marker):
    data = jpeg(draw(0))
    assert size_of(data[:2] + marker + data[2:]) == (0, 0)


@given(st.binary(max_size=80))
def test_any_bytes_have_a_size_or_none(data):
    height, width = size_of(b"\xff\xd8" + data)
    assert (height == 0) == (width == 0) or b"\xff" in data
