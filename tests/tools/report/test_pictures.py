import base64
from io import BytesIO

import pytest
from PIL import Image

from thermopile.tools.report.sheets import EDGES, data_uris, read_pictures, reduced


def jpeg(size, comment=b""):
    data = BytesIO()
    picture = Image.effect_mandelbrot(size, (-2, -1, 1, 1), 20).convert("RGB")
    picture.save(data, "JPEG", comment=comment)
    return data.getvalue()


def size_of(data):
    with Image.open(BytesIO(data)) as picture:
        return picture.size


def decoded(uri):
    assert uri.startswith("data:image/jpeg;base64,")
    return base64.b64decode(uri.partition(",")[2])


def test_a_small_picture_is_shown_as_it_is_stored():
    stored = jpeg((32, 32))
    assert decoded(data_uris({0: stored}, [0], 1 << 20)[0]) == stored


def test_a_large_picture_is_reduced_and_keeps_its_proportions():
    assert size_of(reduced(jpeg((800, 400)), 192)) == (192, 96)


def test_what_a_small_picture_s_file_holds_besides_is_left_out():
    assert len(reduced(jpeg((32, 32), comment=b"x" * 60_000), 192)) < 5000


def test_pictures_are_as_large_as_all_of_them_together_may_be():
    stored = {number: jpeg((600, 600)) for number in range(4)}
    sizes = []
    for most in (1 << 20, 80_000, 40_000):
        found = data_uris(stored, [0, 1, 2, 3, 3], most)
        assert sum(len(found[number]) for number in (0, 1, 2, 3, 3)) <= most
        sizes.append(max(size_of(decoded(found[0]))))
    assert sizes[0] == EDGES[0]
    assert sizes[2] < sizes[1] < sizes[0]


def test_without_room_for_the_smallest_size_there_are_no_pictures():
    assert data_uris({0: jpeg((600, 600))}, [0], 100) == {}


def test_one_picture_that_cannot_be_decoded_costs_itself_alone():
    class Stored:
        """A dataset's pictures, of which those of the ids 1 and 2 are damaged."""

        def jpeg(self, sample_id):
            return b"no picture" if sample_id in (1, 2) else jpeg((32, 32))

    notes = []
    assert list(read_pictures(Stored(), [0, 1, 2, 3], notes)) == [0, 3]
    assert notes == ["The picture of sample 1 cannot be shown, nor those of 1 more: not a readable JPEG"]


def test_a_picture_that_cannot_be_decoded_is_an_error():
    with pytest.raises(OSError, match="not a readable JPEG"):
        reduced(b"no picture", 192)
