"""Where the steps' time went, and what to do about it."""

import pytest

from thermopile.trainer.metrics.step_report import hints, percent, split


def line(seconds=1.0, **parts):
    return {"step": 1, "loss": 0.5, "step_seconds": seconds} | {f"{part}_seconds": s for part, s in parts.items()}


def test_shares_are_of_the_summed_time_of_all_steps_and_the_rest_is_other():
    lines = [
        line(1.0, data_wait=0.5, store_wait=0.0, forward_backward=0.25, optimizer=0.0, communication=0.0),
        line(3.0, data_wait=0.5, store_wait=0.0, forward_backward=1.75, optimizer=0.5, communication=0.25),
    ]
    assert split(lines) == pytest.approx(
        {"data_wait": 0.25, "store_wait": 0.0, "forward_backward": 0.5, "optimizer": 0.125, "communication": 0.0625,
         "other": 0.0625}
    )  # fmt: skip


def test_the_backlog_is_counted_in_steps_and_is_no_part_of_the_whole():
    assert split([line(0.5, data_wait=0.1, write_backlog=1.5)]) == pytest.approx(
        {"data_wait": 0.2, "write_backlog": 3.0, "other": 0.8}
    )


def test_lines_without_times_do_not_count():
    old, evaluation = {"step": 1, "data_wait_seconds": 3.0}, {"step": 2, "evaluation": {"knn": 0.5}}
    assert split([old, evaluation]) == {}
    assert split([old, evaluation, line(2.0, data_wait=1.0)]) == {"data_wait": 0.5, "other": 0.5}
    assert split([line(2.0, data_wait=None)]) == {"other": 1.0}
    assert split([line(None, data_wait=1.0)]) == {}


def test_parts_that_exceed_the_whole_leave_nothing_else():
    assert split([line(1.0, data_wait=0.4, forward_backward=0.601)])["other"] == 0.0


def test_a_wait_above_a_tenth_gives_one_line_that_says_how_to_shorten_it():
    (data,) = hints([line(data_wait=0.23, store_wait=0.1)], {}).values()
    assert data.startswith("data wait 23%: ")
    for words in ("--max-size", "data.workers", "thermopile bench loader"):
        assert words in data
    (store,) = hints([line(data_wait=0.05, store_wait=0.11)], {}).values()
    assert store.startswith("store wait 11%: ")
    for words in ("state.memory_budget", "state.prefetch_steps", "disk", "thermopile bench step"):
        assert words in store
    assert "\n" not in data + store


def step_with_silent(image, text, epoch=2):
    shares = {"image/share_silent": image, "text/share_silent": text, "epoch": epoch}
    return line() | {"image/tau_mean": 0.1, "text/tau_mean": 0.1} | shares


@pytest.mark.parametrize(
    ("objective", "cure"),
    [
        ({"eta": 0.02}, "set `objective.tau_step` to 0.1"),
        ({"eta": 0.02, "tau_step": 0.3}, "set `objective.tau_step` to 0.1"),
        ({"eta": 0.02, "tau_step": 0.1}, "lower `objective.eta`, to 0.01 for example"),
    ],
)
def test_more_than_a_hundredth_of_silent_anchors_give_one_line_on_a_setting_that_is_not_yet_so(objective, cure):
    (silent,) = hints([step_with_silent(0.0, 0.0), step_with_silent(0.03, 0.05)], objective).values()
    assert silent.startswith("silent anchors 2.0%: ")
    assert silent.endswith(cure)
    assert hints([step_with_silent(0.0, 0.02)], objective) == {}


def test_anchors_may_be_silent_in_the_first_two_epochs():
    assert hints([step_with_silent(0.5, 0.5, epoch=1)], {}) == {}
    (silent,) = hints([step_with_silent(0.5, 0.5, epoch=1), step_with_silent(0.02, 0.04)], {}).values()
    assert silent.startswith("silent anchors 3.0%: ")


@pytest.mark.parametrize("silent", [{"image/share_silent": 0.5}, {"image/tau_mean": 0.1, "image/share_silent": None}])
def test_anchors_of_a_constant_temperature_or_a_damaged_line_are_not_silent(silent):
    assert hints([line() | silent | {"epoch": 2}], {}) == {}


def test_no_wait_gives_no_hint():
    assert hints([line(data_wait=0.1, store_wait=0.0, forward_backward=0.9)], {}) == {}
    assert hints([], {}) == {}


@pytest.mark.parametrize(
    ("done", "of", "digits", "shown"),
    [
        (999, 1_000, 0, "over 99%"), (1_000, 1_000, 0, "100%"), (1, 1_000, 0, "under 1%"), (0, 1_000, 0, "0%"),
        (99_999, 100_000, 1, "over 99.9%"), (1, 100_000, 1, "under 0.1%"), (20, 80, 1, "25.0%"),
    ],
)  # fmt: skip
def test_a_share_is_not_rounded_to_all_or_nothing(done, of, digits, shown):
    assert percent(done / of, digits) == shown
