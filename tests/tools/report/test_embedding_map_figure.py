from dataclasses import replace

import numpy as np
import pytest

from thermopile.tools.inspection.features.embedding_map import Colouring, EmbeddingMap, Points
from thermopile.tools.inspection.temperatures.distribution import Distribution
from thermopile.tools.inspection.temperatures.survey import Side
from thermopile.tools.report.figures.embedding_map import CLASS_COLOURS, colour_legend, draw_embedding_map
from thermopile.tools.report.figures.svg import NARROW, WIDE
from thermopile.tools.report.figures.svg import SIDES as SIDE_COLOURS

from support.figures import SVG, is_of, pixels, svg, texts

SIDES = [Side(name, Distribution(), None, None) for name in ("image", "text")]
NONE = np.zeros(60, np.bool_)


def points(seed):
    rng = np.random.default_rng(seed)
    tau = rng.uniform(0.01, 0.1, 60).astype(np.float32)
    return Points(rng.normal(size=(60, 2)).astype(np.float32), tau, tau < 0.02, tau > 0.09)


@pytest.fixture
def shown():
    classes = Colouring(["head", "medium", "tail"], np.arange(60) % 3, are_classes=False)
    sides = {"image": points(0), "text": points(1)}
    return EmbeddingMap("step-5", "raw", 30.0, np.arange(60), sides, classes, np.ones(60, np.float32))


def test_the_panels_stand_side_by_side_or_on_a_phone_one_above_the_other(shown):
    wide, high = (pixels(draw_embedding_map, shown, SIDES, size=size) for size in (WIDE, NARROW))
    assert wide.shape[1] > 1.5 * wide.shape[0]
    assert high.shape[0] > 1.5 * high.shape[1]


def test_coldest_and_hottest_have_their_colours_and_every_kind_its_own(shown):
    image = pixels(draw_embedding_map, shown, SIDES)
    for colour in (*SIDE_COLOURS, *CLASS_COLOURS[:3]):
        assert is_of(image, colour).sum() > 20
    bare = {name: of_side._replace(coldest=NONE, hottest=NONE) for name, of_side in shown.points.items()}
    unmarked = pixels(draw_embedding_map, replace(shown, points=bare, colouring=None), SIDES)
    assert not is_of(unmarked, SIDE_COLOURS[1]).sum() > 20


def test_the_dots_are_a_raster_and_the_marks_and_texts_are_not(shown):
    root = svg(draw_embedding_map, shown, SIDES)
    assert len(list(root.iter(f"{SVG}image"))) == 3, "two panels and the scale"
    assert len(list(root.iter(f"{SVG}use"))) < 150
    assert {"lowest tau", "tail classes", "tau (dimensionless)"} <= {*texts(root)}


def test_names_of_classes_are_not_drawn_but_listed_in_the_legend_of_the_page(shown):
    hostile = ["$\\frac{1}{0}$", "<script>", "\u0645\u0631\u062d\u0628\u0627"]
    codes = np.arange(60) % 4 - 1
    of = replace(shown, colouring=Colouring(hostile, codes, are_classes=True))
    assert not {*hostile} & {*texts(svg(draw_embedding_map, of, SIDES, size=NARROW))}
    assert colour_legend(Colouring(hostile, codes, are_classes=True)) == [
        (colour, f"class {place}", name)
        for place, (colour, name) in enumerate(zip(CLASS_COLOURS, hostile, strict=False), start=1)
    ]
    assert [words for _, words, _ in colour_legend(shown.colouring)] == [
        "head classes",
        "medium classes",
        "tail classes",
    ]


def test_one_side_of_one_tau_and_no_class_is_drawn_as_well(shown):
    flat = points(0)._replace(tau=np.full(60, 0.05, np.float32), coldest=NONE, hottest=NONE)
    alone = replace(shown, points={"sample": flat}, colouring=None, similarity=None)
    one, two = (
        pixels(draw_embedding_map, of, sides, size=NARROW)
        for of, sides in ((alone, [Side("sample", Distribution(), None, None)]), (shown, SIDES))
    )
    assert one.shape[0] < 0.6 * two.shape[0]
