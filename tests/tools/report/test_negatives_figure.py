import numpy as np

from thermopile.tools.report.figures.embedding_map import CLASS_COLOURS
from thermopile.tools.report.figures.lines import draw_curves
from thermopile.tools.report.figures.svg import NARROW

from support.figures import is_of, pixels, svg, texts


def curve(tau):
    weights = np.exp(-np.linspace(0, 2, 999) / tau)
    return list(zip(range(1, 1000), (weights / weights.sum()).tolist(), strict=True))


def test_each_side_has_a_panel_and_each_sample_a_line_of_its_colour_and_a_label():
    curves = {side: {"1204, tau 0.5": curve(0.5), "77, tau 0.02": curve(0.02)} for side in ("image", "text")}
    for size in ({}, {"size": NARROW}):
        image = pixels(draw_curves, curves, **size)
        halves = np.array_split(image, 2, axis=0 if size else 1)
        assert all(is_of(half, colour).sum() > 20 for half in halves for colour in CLASS_COLOURS[:2])
    assert {"1204, tau 0.5", "77, tau 0.02", "all alike", "p* (image)", "p* (text)"} <= {
        *texts(svg(draw_curves, curves))
    }


def test_a_cold_samples_line_falls_below_the_even_weight_and_a_hot_ones_stays_beside_it():
    def height(tau):
        return is_of(pixels(draw_curves, {"sample": {"one": curve(tau)}}), CLASS_COLOURS[0]).any(1).sum()

    assert height(0.02) > 4 * height(50.0)
