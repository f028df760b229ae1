from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import numpy as np
import pytest

from thermopile.state_store.history import Snapshot
from thermopile.tools.inspection.temperatures.correlation import JointCounts
from thermopile.tools.inspection.temperatures.distribution import Distribution
from thermopile.tools.inspection.temperatures.drift import Drift, SideDrift
from thermopile.tools.inspection.temperatures.samples import StateAt
from thermopile.tools.inspection.temperatures.through_time import Moment, TauAt, ThroughTime
from thermopile.tools.report.figures.histograms import draw_drift
from thermopile.tools.report.figures.lines import draw_history, draw_tau_over_time
from thermopile.tools.report.figures.svg import NARROW, WIDE, svg_of
from thermopile.tools.report.figures.svg import SIDES as SIDE_COLOURS

from support.figures import is_of, pixels

SIDES = ("image", "text")
FEWEST = "#4e566c"
"""The darkest part of cividis that shows on dark paper."""


def snapshot(step):
    return Snapshot(f"ID{step}", step, 1, "", datetime(2026, 1, 1, tzinfo=UTC), "", 0)


def counted(values):
    distribution = Distribution()
    distribution.add(values)
    return distribution


@pytest.fixture(scope="module")
def through_time():
    quantiles = [np.array([0.01, 0.04, 0.05, 0.06, 0.09]) * factor for factor in (1.0, 1.5, 1.6)]
    moments = [
        Moment(f"step-{step}", step, 60, {side: TauAt(tuple(found.tolist()), None) for side in SIDES})
        for step, found in zip((200, 400, 440), quantiles, strict=True)
    ]
    return ThroughTime(SIDES, every=1, samples_read=60, moments=moments)


@pytest.fixture(scope="module")
def moved():
    rng = np.random.default_rng(0)
    before, after = (rng.uniform(0.01, 0.1, 500).astype(np.float32) for _ in range(2))
    joint = JointCounts(counted(before), counted(after))
    joint.add(before, after)
    sides = [SideDrift(name, joint.result(), counted(after - before), 0.5, 0.5, [], [])
             for name in SIDES]  # fmt: skip
    return Drift(snapshot(200), snapshot(400), 500, sides)


def history(visits):
    rows = [{"visits": count, "image/tau": 0.05, "text/tau": 0.08} for count in visits]
    return [StateAt(snapshot(100 * i), row) for i, row in enumerate(rows)]


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "phone"])
def test_bands_are_drawn_in_the_colours_of_the_sides_the_same_each_time(through_time, size):
    image = pixels(draw_tau_over_time, through_time, size=size)
    assert all(is_of(image, colour).sum() > 500 for colour in SIDE_COLOURS)
    assert svg_of(partial(draw_tau_over_time, through_time), size) == svg_of(
        partial(draw_tau_over_time, through_time), size
    )


def test_one_snapshot_alone_is_drawn_as_a_box(through_time):
    only_images = replace(through_time, sides=("image",))
    alone = replace(only_images, moments=only_images.moments[:1])
    # Where the box of the middle half is opaque enough, its colour on white paper.
    middle_half = is_of(pixels(draw_tau_over_time, alone), "#6cadd3")
    assert np.ptp(np.nonzero(middle_half)[1]) > 100
    assert middle_half.sum() > 1000


def test_a_sample_is_hollow_where_it_was_not_visited_yet():
    never, once, always = (
        is_of(pixels(draw_history, history(visits), SIDES), SIDE_COLOURS[0]).sum()
        for visits in ((0, 0, 0), (0, 0, 1), (1, 2, 3))
    )
    assert never < once < always


def test_a_sample_is_drawn_from_one_snapshot_alone():
    assert is_of(pixels(draw_history, history([1]), SIDES, size=NARROW), SIDE_COLOURS[1]).sum() > 20


def test_drift_is_drawn_side_by_side_or_one_below_the_other(moved):
    wide, tall = (pixels(draw_drift, moved, size=size) for size in (WIDE, NARROW))
    assert wide.shape[1] > wide.shape[0]
    assert tall.shape[0] > tall.shape[1]
    assert is_of(wide, FEWEST).sum() > 10_000  # bins of one sample


def test_drift_of_one_sample_alone_has_a_scale_that_begins_at_one(moved):
    one = np.array([0.05], np.float32)
    joint = JointCounts(counted(one), counted(one))
    joint.add(one, one)
    alone = replace(moved, visited=1, sides=[replace(moved.sides[0], name="sample", joint=joint.result())])
    assert is_of(pixels(draw_drift, alone), FEWEST).sum() > 100_000
