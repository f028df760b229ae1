"""Drawings with titles and keywords: which become pairs, and what their captions are."""

import csv
import struct

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from thermopile.benchmarks.openclipart import Pair, main, write_small

SVG = """<svg xmlns="http://www.w3.org/2000/svg"><metadata>
<rdf:RDF xmlns:cc="http://web.resource.org/cc/" xmlns:dc="http://purl.org/dc/elements/1.1/"
  xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><cc:Work>{title}<dc:subject><rdf:Bag>{keywords}</rdf:Bag>
</dc:subject><dc:publisher><cc:Agent><dc:title>no title</dc:title></cc:Agent></dc:publisher></cc:Work></rdf:RDF>
</metadata></svg>"""


@pytest.fixture
def draw(tmp_path):
    """Return a function that puts a drawing where the packages have theirs."""

    def draw(path, title="<dc:title>A frog</dc:title>", keywords=(), svg=None, width=9):
        items = "".join(f"<rdf:li>{word}</rdf:li>" for word in keywords)
        content = SVG.format(title=title, keywords=items) if svg is None else svg
        for kind, data in (("png", bytes(16) + struct.pack(">II", width, 9)), ("svg", content.encode())):
            file = tmp_path / f"openclipart-{kind}" / "usr/share/openclipart" / kind / f"{path}.{kind}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return file

    for kind in ("png", "svg"):
        (tmp_path / f"openclipart-{kind}").mkdir()
    return draw


def made(tmp_path, *words):
    done = CliRunner().invoke(main, [str(tmp_path), *words])
    assert done.exit_code == 0, done.output
    with (tmp_path / "pairs.csv").open(newline="") as file:
        return [(row["filepath"].rpartition("/png/")[2], row["title"], row["folder"]) for row in csv.DictReader(file)]


def test_a_caption_is_the_title_and_six_keywords(draw, tmp_path):
    draw("animals/frog", keywords=["green", " pond\n life ", "", *"abcdef"])
    assert made(tmp_path) == [("animals/frog.png", "A frog, green, pond life, a, b, c", "animals")]


def test_only_drawings_with_a_caption_of_their_own_are_pairs(draw, tmp_path):
    draw("animals/frog")
    draw("animals/short", title="<dc:title>1 2 3 a b</dc:title>")
    draw("animals/untitled", title="")
    draw("animals/broken", svg="<svg>")
    draw("animals/without", svg="<svg/>")
    draw("computer/icons/theme/frog")
    draw("shapes/stars/star")
    draw("animals/only").unlink()
    png = tmp_path / "openclipart-png/usr/share/openclipart/png/animals"
    (png / "again.png").symlink_to(png / "frog.png")
    draw("animals/again2")
    (png / "again2.png").unlink()
    (png / "again2.png").symlink_to(png / "frog.png")
    assert [path for path, *_ in made(tmp_path)] == ["animals/frog.png"]
    assert [path for path, *_ in made(tmp_path, "--crowd")] == ["animals/frog.png", "shapes/stars/star.png"]


def test_small_pictures_are_on_white_in_folders_that_a_conversion_reads(tmp_path):
    Image.new("RGBA", (300, 200), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    write_small(tmp_path, [Pair("clear.png", "nothing, at all", "shapes")], tmp_path / "small")
    with Image.open(tmp_path / "small" / "0.jpg") as picture:
        assert (picture.size, picture.mode) == ((128, 85), "RGB")
        assert np.asarray(picture).min() == 255
    assert (tmp_path / "small" / "pairs.csv").read_text().splitlines()[1] == '0.jpg,"nothing, at all",shapes'
