"""The figure of mean tau by class size: dots, intervals and what is left out where classes are small or many."""

import dataclasses
from itertools import pairwise

import matplotlib.figure
import numpy as np
import pytest
from matplotlib.collections import PathCollection

from thermopile.tools.inspection.temperatures.distribution import Distribution
from thermopile.tools.inspection.temperatures.groups import GroupCounts
from thermopile.tools.inspection.temperatures.survey import Side
from thermopile.tools.report.figures.by_group import draw_tau_by_group
from thermopile.tools.report.figures.svg import NARROW, WIDE
from thermopile.tools.report.html import part

from support.figures import LINK, SVG, svg, texts

SIDES = [Side(name, Distribution(), None, None) for name in ("image", "text")]


def groups_of(sizes, tau, sides=SIDES):
    """Groups of these sizes, all visited, with the tau of their samples, largest group first; for each side alike."""
    codes, names = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes), [f"class {i:04}" for i in range(len(sizes))]
    counts = GroupCounts("group", codes, names, {side.name: (0.1, 0.0, 1.0) for side in sides})
    everybody, tau = np.ones(len(codes), bool), {side.name: np.array(tau, np.float32) for side in sides}
    counts.add(range(len(codes)), everybody, everybody, tau)
    return counts.result(np.arange(len(codes)), tau)


def drawn(groups, sides=SIDES):
    figure = matplotlib.figure.Figure((8, 3.6))
    draw_tau_by_group(sides, groups, figure)
    return figure.axes[0]


def dots_of(axes):
    """The scattered dots that are there, apart from bars."""
    return [each for each in axes.collections if isinstance(each, PathCollection) and len(each.get_offsets())]


def is_hollow(dots):
    return len(dots.get_facecolors()) == 0


@pytest.fixture
def few():
    """Classes of 40, 6 and 5 samples about 0.1, and two of four and two samples that lie far apart."""
    rng = np.random.default_rng(0)
    return groups_of([40, 6, 5, 4, 2], [*rng.uniform(0.09, 0.11, 51), 0.1, 0.9, 0.1, 0.9, 0.01, 0.99])


def test_small_classes_do_not_stretch_the_axis(few):
    low, high = drawn(few).get_ylim()
    means = few.tau["image"].mean
    assert means.max() < high < 1.1 * means.max()
    assert 0 <= low < means.min()


def test_classes_of_five_visited_samples_have_an_interval_and_others_are_hollow(few):
    axes = drawn(few)
    image = dots_of(axes)[:2]
    assert [(dots.get_offsets()[:, 0].tolist(), is_hollow(dots)) for dots in image] == [
        ([40, 6, 5], False), ([4, 2], True),
    ]  # fmt: skip
    bars = axes.containers[0].lines[2][0].get_segments()
    assert [bar[0, 0] for bar in bars] == [40, 6, 5]
    assert "Hollow: fewer than 5 visited samples" in part("groups.html", "legend", few)


def test_where_all_classes_have_an_interval_the_caption_says_nothing_of_hollow_dots():
    large = groups_of([6, 5], np.linspace(0.1, 0.2, 11))
    assert not any(map(is_hollow, dots_of(drawn(large))))
    assert "ollow" not in part("groups.html", "legend", large)


@pytest.fixture(scope="module")
def many():
    """1,000 classes of five to one samples."""
    sizes = np.repeat([5, 4, 3, 2, 1], 200)
    return groups_of(sizes, np.random.default_rng(1).uniform(0.05, 0.2, sizes.sum()))


def test_dots_of_many_classes_of_one_size_lie_side_by_side_near_their_size(many):
    image, text = (dots.get_offsets() for dots in dots_of(drawn(many)))
    for dots in (image, text):
        np.testing.assert_array_equal(dots[:, 1], many.tau["image"].mean)
        aside = np.log(dots[:, 0] / many.sizes)
        assert np.abs(aside).max() < 0.1
        assert np.ptp(aside) > 0.02
        assert len(np.unique(dots[:, 0])) == 1000
    assert (image[:, 0] < many.sizes).all()
    assert (text[:, 0] > many.sizes).all()


def test_among_many_classes_every_size_has_its_median_and_quartiles(many):
    bars = drawn(many).containers[0]
    medians, segments = bars.lines[0].get_ydata(), bars.lines[2][0].get_segments()
    for place, size in enumerate((1, 2, 3, 4, 5)):
        means = many.tau["image"].mean[many.sizes == size]
        assert medians[place] == pytest.approx(np.median(means))
        assert segments[place][:, 1] == pytest.approx(np.quantile(means, (0.25, 0.75)))
    assert "medians of classes of about one size" in part("groups.html", "legend", many)


def test_many_sizes_are_taken_together_in_a_few_ranges():
    sizes = np.arange(300, 0, -1)
    found = drawn(groups_of(sizes, np.repeat(0.1 + sizes / 1000, sizes), SIDES[:1]), SIDES[:1])
    medians = found.containers[0].lines[0].get_ydata()
    assert 5 < len(medians) <= 12
    assert (np.diff(medians) > 0).all()


def test_every_one_of_a_few_sizes_has_its_tick(many):
    assert drawn(many).get_xticks().tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "phone"])
def test_sizes_on_the_axis_lie_apart_and_none_is_said_to_be_0(size):
    figure = matplotlib.figure.Figure(size, layout="constrained")
    draw_tau_by_group(SIDES[:1], groups_of([674, 104, 38, 1], np.full(817, 0.1), SIDES[:1]), figure)
    figure.draw_without_rendering()
    labels = [label for label in figure.axes[0].get_xticklabels() if label.get_text()]
    assert {"1", "10", "100", "1,000"} <= {label.get_text() for label in labels}
    assert "0" not in {label.get_text() for label in labels}, "a third of a sample"
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "phone"])
def test_classes_of_which_none_was_visited_are_left_out(many, size):
    unknown = {name: of._replace(mean=np.full(1000, np.nan)) for name, of in many.tau.items()}
    nobody = dataclasses.replace(many, visited=np.zeros_like(many.visited), tau=unknown)
    assert "mean tau of the class (dimensionless)" in texts(svg(draw_tau_by_group, SIDES, nobody, size=size))


def test_few_classes_have_their_names_beside_their_dots_and_more_than_a_dozen_have_none(few):
    names = drawn(few).texts
    assert sorted(each.get_text() for each in names) == sorted(few.names)
    assert sorted(each.xy for each in names) == sorted(zip(few.sizes, few.tau["image"].mean, strict=True))
    assert len(drawn(groups_of([2] * 13, [0.1] * 26)).texts) == 0


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "phone"])
def test_no_name_covers_another(size):
    alike = dataclasses.replace(groups_of([2] * 12, [0.1] * 24), names=[f"class {i:08}" for i in range(12)])
    figure = matplotlib.figure.Figure(size, layout="constrained")
    draw_tau_by_group(SIDES, alike, figure)
    boxes = [name.get_window_extent() for name in figure.axes[0].texts]
    assert len(boxes) == 6, "all of one dot: left, right, above and below"
    assert all(0 < box.x0 < box.x1 < figure.bbox.x1 for box in boxes)
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])


def test_names_in_a_figure_are_text_whatever_they_hold():
    hostile = ["<script>alert(1)</script>", "$\\frac{1}{0}$", "</svg>\"'&amp;", "\u202e\0", "日本"]
    groups = dataclasses.replace(groups_of([9, 8, 7, 6, 5], np.linspace(0.1, 0.5, 35)), names=hostile)
    shown = texts(svg(draw_tau_by_group, SIDES, groups))
    assert {"<script>alert(1)</scr…"[:20] + "…", *hostile[1:3], "[U+202E][U+0000]", "日本"} <= {*shown}


@pytest.mark.wide
def test_dots_of_very_many_classes_are_one_raster_in_the_figure():
    sizes = np.repeat(np.arange(50, 0, -1), 400)
    root = svg(draw_tau_by_group, SIDES, groups_of(sizes, np.repeat(np.linspace(0.01, 0.2, len(sizes)), sizes)))
    assert len(list(root.iter(f"{SVG}image"))) == 1
    assert sum(len(str(value)) for element in root.iter() for value in element.attrib.values()) < 200_000
    assert root.find(f".//{SVG}image").get(LINK).startswith("data:image/png;base64,")


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "phone"])
def test_a_long_name_at_the_edge_stands_on_the_other_side(size):
    sizes, names = [50, 40, 3], ["a class with a long name", "another long name", "w" * 20]
    groups = dataclasses.replace(groups_of(sizes, np.repeat([0.1, 0.2, 0.3], sizes)), names=names)
    figure = matplotlib.figure.Figure(size, layout="constrained")
    draw_tau_by_group(SIDES, groups, figure)
    boxes = [name.get_window_extent() for name in figure.axes[0].texts]
    assert len(boxes) == 3
    assert all(figure.axes[0].bbox.x0 < box.x0 and box.x1 < figure.bbox.x1 for box in boxes)
