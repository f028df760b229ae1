import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from thermopile.tools.inspection import summary
from thermopile.tools.inspection.features.embedding_map import MAX_CLASSES, Colouring, EmbeddingMap, Points
from thermopile.tools.report.figures.embedding_map import CLASS_COLOURS, draw_embedding_map
from thermopile.tools.report.figures.svg import GREY, NARROW, WIDE
from thermopile.tools.report.figures.svg import SIDES as SIDE_COLOURS
from thermopile.tools.report.html import part

from support.figures import SVG, is_of, pixels, svg, texts

NONE = np.zeros(60, np.bool_)


def points(seed):
    rng = np.random.default_rng(seed)
    tau = rng.uniform(0.01, 0.1, 60).astype(np.float32)
    return Points(rng.normal(size=(60, 2)).astype(np.float32), tau, tau < 0.02, tau > 0.09)


@pytest.fixture
def shown():
    classes = Colouring(["head classes", "medium classes", "tail classes"], np.arange(60) % 3, "class")
    sides = {"image": points(0), "text": points(1)}
    return EmbeddingMap("step-5", "raw", 30.0, np.arange(60), sides, classes, np.ones(60, np.float32))


def test_the_panels_stand_side_by_side_or_on_a_phone_one_above_the_other(shown):
    wide, high = (pixels(draw_embedding_map, shown, size=size) for size in (WIDE, NARROW))
    assert wide.shape[1] > 1.5 * wide.shape[0]
    assert high.shape[0] > 1.5 * high.shape[1]


def test_coldest_and_hottest_have_their_colours_and_every_kind_its_own(shown):
    image = pixels(draw_embedding_map, shown)
    for colour in (*SIDE_COLOURS, *CLASS_COLOURS[:3]):
        assert is_of(image, colour).sum() > 20
    bare = {name: of_side._replace(coldest=NONE, hottest=NONE) for name, of_side in shown.points.items()}
    unmarked = pixels(draw_embedding_map, replace(shown, points=bare, colouring=None))
    assert not is_of(unmarked, SIDE_COLOURS[1]).sum() > 20


def test_the_dots_are_a_raster_and_the_marks_and_texts_are_not(shown):
    root = svg(draw_embedding_map, shown)
    assert len(list(root.iter(f"{SVG}image"))) == 3, "two panels and the scale"
    assert len(list(root.iter(f"{SVG}use"))) < 150
    assert {"lowest tau", "image", "text", "tau (dimensionless)"} <= {*texts(root)}


def test_names_of_classes_are_not_drawn_but_listed_below_with_their_colours(shown, monkeypatch):
    hostile = ["$\\frac{1}{0}$", "<script>", "\u0645\u0631\u062d\u0628\u0627"]
    codes = np.arange(60) % 4 - 1
    of = replace(shown, colouring=Colouring(hostile, codes, "class"))
    assert not {*hostile} & {*texts(svg(draw_embedding_map, of, size=NARROW))}
    survey = SimpleNamespace(sides=[], visited=60, samples=60)
    monkeypatch.setattr(summary, "what", lambda *of: "")
    page = part("sections.html", "map", None, survey, of)
    listed = re.findall('<li><i style="background: (#......)"></i> <bdi>(.*?)</bdi></li>', page)
    assert [colour for colour, _ in listed] == list(CLASS_COLOURS[:3])
    assert [name for _, name in listed][1:] == ["&lt;script&gt;", hostile[2]]
    assert "no class</li>" in page


def test_twenty_classes_have_colours_that_differ_from_each_other_and_from_both_papers(shown):
    names = [f"class {place}" for place in range(MAX_CLASSES)]
    twenty = Colouring(names, np.arange(60) % 20, "class")
    bare = {name: of._replace(tau=None, coldest=NONE, hottest=NONE) for name, of in shown.points.items()}
    image = pixels(draw_embedding_map, replace(shown, points=bare, colouring=twenty))
    assert all(is_of(image, colour).any() for colour in CLASS_COLOURS)
    levels = np.array([[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in (*CLASS_COLOURS, "#8a8f96")])
    apart = np.abs(levels[:, None] - levels).max(2) + 255 * np.eye(len(levels))
    assert apart.min() >= 40


def test_without_temperatures_there_is_one_panel_of_classes_or_of_grey_dots(shown):
    bare = {name: of._replace(tau=None, coldest=NONE, hottest=NONE) for name, of in shown.points.items()}
    for colouring, colour in ((shown.colouring, CLASS_COLOURS[2]), (None, GREY)):
        one = replace(shown, points=bare, colouring=colouring)
        assert is_of(pixels(draw_embedding_map, one), colour).sum() > 20
        root = svg(draw_embedding_map, one)
        assert len(list(root.iter(f"{SVG}image"))) == 1
        assert {"image", "text"} <= {*texts(root)}
        assert not {"lowest tau", "tau (dimensionless)"} & {*texts(root)}


def test_one_side_of_one_tau_and_no_class_is_drawn_as_well(shown):
    flat = points(0)._replace(tau=np.full(60, 0.05, np.float32), coldest=NONE, hottest=NONE)
    alone = replace(shown, points={"sample": flat}, colouring=None, similarity=None)
    one, two = (pixels(draw_embedding_map, of, size=NARROW) for of in (alone, shown))
    assert one.shape[0] < 0.6 * two.shape[0]
