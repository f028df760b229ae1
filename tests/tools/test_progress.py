"""Progress where there is no terminal: lines for a log."""

import pytest

from thermopile.tools import progress
from thermopile.tools.progress import duration, progress_bar, task_bars


@pytest.fixture
def clock(monkeypatch):
    """The time that the progress sees, in seconds, as a list to be changed."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_says_how_far_it_is_and_how_long_the_rest_takes(clock, capsys):
    with progress_bar("training", 1000) as bar:
        bar.update(200)  # a run that goes on
        for clock[0], done in ((105, 205), (110, 300), (120, 400), (130, 1000)):
            bar.update(done, "loss 1.0")
    assert capsys.readouterr().err.splitlines() == [
        "training: 300/1,000, 1 min left loss 1.0",
        "training: 400/1,000, 1 min left loss 1.0",
        "training: 1,000/1,000 loss 1.0",
    ]


def test_the_time_left_waits_until_the_work_is_in_its_stride(clock, capsys):
    with progress_bar("training", 840) as bar:
        bar.update(0)
        for clock[0], done in ((112, 10), (124, 190)):  # compiling took the first twelve seconds
            bar.update(done)
    assert capsys.readouterr().err.splitlines() == ["training: 10/840 ", "training: 190/840, 44 s left "]


def test_lines_become_rarer_down_to_one_in_ten_minutes(clock, capsys):
    with progress_bar("training", 10_000) as bar:
        for second in range(3601):
            clock[0] = 100 + second
            bar.update(second)
    shown = [int(line.split()[1].split("/")[0].replace(",", "")) for line in capsys.readouterr().err.splitlines()]
    assert shown == [10, 20, 40, 80, 160, 320, 640, 1240, 1840, 2440, 3040]


def test_a_line_before_anything_was_done_gives_no_time(clock, capsys):
    with progress_bar("converting", 10) as bar:
        for clock[0] in (100, 110):
            bar.update(0)
    assert capsys.readouterr().err == "converting: 0/10 \n"


def test_more_than_the_total_that_was_estimated_leaves_no_time(clock, capsys):
    with progress_bar("converting", 10) as bar:
        for clock[0], done in ((100, 0), (101, 1), (110, 12)):
            bar.update(done)
    assert capsys.readouterr().err == "converting: 12/10 \n"


def test_a_task_that_takes_less_than_a_second_is_not_shown_unless_it_begins_with_nothing_done(clock, capsys):
    with task_bars() as show:
        for clock[0], done in ((100, 5), (100.9, 10)):
            show("short", done, 10)
        for clock[0], done in ((200, 5), (201.1, 10)):
            show("long", done, 10)
        for clock[0], done in ((300, 0), (300.1, 10)):
            show("loading", done, 10)
        show("short", 10, 10)  # again, long after its first call
    assert capsys.readouterr().err.splitlines() == ["long: 10/10 ", "loading: 10/10 "]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (3660, "1 h 1 min"), (90_000, "1 d 1 h")],
)
def test_durations_have_two_units_at_most(seconds, said):
    assert duration(seconds) == said
