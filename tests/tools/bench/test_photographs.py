import io

from PIL import Image

from thermopile.tools.bench.photographs import HEIGHT, WIDTH, jpegs


def test_photographs_are_all_different_and_the_same_at_every_call():
    files = list(jpegs(20))
    assert len(set(files)) == 20
    assert list(jpegs(3)) == files[:3]


def test_photographs_are_jpegs_of_the_size_that_is_told():
    for file in jpegs(2):
        with Image.open(io.BytesIO(file)) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (WIDTH, HEIGHT))
