import base64
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from thermopile.tools.contact_sheet import SHEET_SAMPLES, choose_sheet, thumbnail
from thermopile.tools.temperatures import Side, summarise


def side_of(tau):
    tau = np.array(tau, np.float32)
    return Side("first", "image", tau, summarise(tau, None, None))


def jpeg(size):
    data = BytesIO()
    Image.effect_mandelbrot(size, (-2, -1, 1, 1), 20).convert("RGB").save(data, "JPEG")
    return data.getvalue()


def decoded(uri):
    assert uri.startswith("data:image/jpeg;base64,")
    return base64.b64decode(uri.partition(",")[2])


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=60))
def test_a_sheet_holds_the_most_extreme_visited_samples_and_of_equals_the_lowest_ids(samples):
    tau = [value / 10 for value, _ in samples]
    visited = np.array([seen for _, seen in samples])
    visited[0] = True
    ids = np.flatnonzero(visited).tolist()
    for end, sign in (("lowest", 1), ("highest", -1)):
        sheet = choose_sheet(side_of(tau), visited, end)
        expected = sorted(ids, key=lambda i: (sign * tau[i], i))
        assert sheet.sample_ids == expected[:SHEET_SAMPLES]
        assert sheet.not_shown == sum(tau[i] == tau[sheet.sample_ids[-1]] for i in expected[SHEET_SAMPLES:])


def test_a_small_picture_is_shown_as_it_is_stored():
    stored = jpeg((32, 32))
    assert decoded(thumbnail(stored)) == stored


def test_a_large_picture_is_reduced_and_keeps_its_proportions():
    with Image.open(BytesIO(decoded(thumbnail(jpeg((800, 400)))))) as picture:
        assert picture.size == (192, 96)


def test_a_picture_that_cannot_be_decoded_is_an_error():
    with pytest.raises(OSError, match="cannot identify"):
        thumbnail(b"no picture")
