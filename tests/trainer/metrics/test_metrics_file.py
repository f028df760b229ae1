"""Reading metrics.jsonl from its end."""

import os
import tracemalloc
import zlib
from pathlib import Path

import pytest

from thermopile.storage.files import NotRegularFileError
from thermopile.storage.log import FileLog
from thermopile.storage.sealed_json import seal_line
from thermopile.trainer.metrics import metrics_file
from thermopile.trainer.metrics.metrics_file import last_lines, loss_curve


def text_of(lines):
    return b"".join(seal_line(line) + b"\n" for line in lines)


def sealed(text):
    """A line whose checksum is right, whatever else it is."""
    return text + b', "crc32": "%08x"}\n' % zlib.crc32(text)


def steps_of(lines):
    return [line["step"] for line in lines]


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_the_last_lines_come_oldest_first_and_evaluations_apart(metrics):
    written = [{"step": step, "loss": float(step)} for step in range(1, 8)]
    written.insert(5, {"step": 5, "evaluation": {"knn": {"10": 0.5}, "of": "test"}})
    metrics.write_bytes(text_of(written))
    steps, evaluations, damaged = last_lines(FileLog(metrics), 3, 2)
    assert damaged == 0
    assert steps == [{"step": step, "loss": float(step)} for step in (5, 6, 7)]
    assert evaluations == [{"step": 5, "evaluation": {"knn/10": 0.5}}]


@pytest.mark.parametrize(
    ("end", "damaged"),
    [
        (b"", 0), (b'{"step": 4, "lo', 0), (b'{"step"', 0), (b"\0" * 100, 0), (b"\n", 1), (b"[1]\n", 1), (b"\xff\n", 1),
        (b'{"step": 4, "loss": 3.0}\n', 1), (b"[" * 10_000 + b"\n", 1), (sealed(b'{"a": ' + b"[" * 10_000), 1),
        (sealed(b'{"step": "x"'), 1), (sealed(b'{"step": NaN'), 1), (sealed(b'{"step": 4, "evaluation": 3'), 1),
        (text_of([{"step": 13, "loss": 3.0}]).replace(b"13", b"93"), 1), (sealed(b"[1"), 1), (b"a\nb\nc\n", 3),
        (text_of([{"step": 4, "loss": 3.0}]).replace(b"\n", b"*"), 1), (text_of([{"step": 4}])[:-3], 0),
    ],
)  # fmt: skip
def test_what_is_no_whole_line_or_was_changed_is_passed_over_and_counted(metrics, end, damaged):
    metrics.write_bytes(text_of([{"step": 2, "loss": 1.0}, {"step": 3, "loss": 2.0}]) + end)
    steps, _, counted = last_lines(FileLog(metrics), 10, 10)
    assert (steps_of(steps), counted) == ([2, 3], damaged)
    assert loss_curve(FileLog(metrics), 60) == [1.0, 2.0]


def test_a_pipe_in_the_place_of_the_file_holds_nothing_up(metrics):
    os.mkfifo(metrics)
    for read in (lambda: last_lines(FileLog(metrics), 1, 1), lambda: loss_curve(metrics, 60)):
        with pytest.raises(NotRegularFileError, match="is a named pipe"):
            read()


def test_numbers_that_are_not_finite_are_unknown(metrics):
    metrics.write_bytes(sealed(b'{"step": 1, "loss": NaN, "a": 1e999, "b": -Infinity, "c": 1' + b"0" * 400))
    ((line,), *_) = last_lines(FileLog(metrics), 1, 1)
    assert line == {"step": 1, "loss": None, "a": None, "b": None, "c": None}
    assert loss_curve(FileLog(metrics), 60) == []


@pytest.mark.parametrize("block_bytes", [60, 61, 128, 1000])
def test_blocks_of_any_size_above_a_line_give_the_same_lines(metrics, monkeypatch, block_bytes):
    monkeypatch.setattr(metrics_file, "BLOCK_BYTES", block_bytes)
    metrics.write_bytes(text_of({"step": step, "loss": 0.5 * step} for step in range(1, 41)))
    assert steps_of(last_lines(FileLog(metrics), 100, 1)[0]) == list(range(1, 41))


def test_the_search_for_evaluations_ends(metrics, monkeypatch):
    monkeypatch.setattr(metrics_file, "MAX_BYTES", 6000)
    monkeypatch.setattr(metrics_file, "BLOCK_BYTES", 1000)
    early = {"step": 1, "evaluation": {"knn": 0.5}}
    late = {"step": 300, "evaluation": {"knn": 0.6}}
    steps = [{"step": step, "loss": 1.0} for step in range(1, 401)]
    metrics.write_bytes(text_of([early, *steps[:300], late, *steps[300:]]))
    found, evaluations, _ = last_lines(FileLog(metrics), 5, 10)
    assert steps_of(found) == [396, 397, 398, 399, 400]
    assert evaluations == [late]


def test_the_curve_of_a_short_file_is_the_mean_of_equal_groups(metrics):
    metrics.write_bytes(text_of({"step": step, "loss": float(step)} for step in range(1, 13)))
    assert loss_curve(FileLog(metrics), 4) == [2.0, 5.0, 8.0, 11.0]
    assert loss_curve(FileLog(metrics), 100) == [float(step) for step in range(1, 13)]


def test_the_curve_of_a_long_file_follows_the_loss_from_glances(metrics):
    metrics.write_bytes(text_of({"step": step, "loss": 1.0 - step / 20_000} for step in range(20_000)))
    assert metrics.stat().st_size > 10 * metrics_file.GLANCE_BYTES
    curve = loss_curve(FileLog(metrics), 10)
    assert curve == pytest.approx([1.0 - place / 9 for place in range(10)], abs=0.06)  # lines differ in length


def test_a_file_of_50_gb_costs_no_more_than_a_short_one(metrics):
    tail = text_of({"step": step, "loss": 0.5} for step in range(1, 2001))
    with metrics.open("wb") as file:
        try:
            os.truncate(metrics, 50 << 30)
        except OSError:
            pytest.skip("this file system has no sparse files of 50 GB")
        file.seek(50 << 30)
        file.write(b"\n" + tail)
    read_before = bytes_read()
    tracemalloc.start()
    try:
        steps, evaluations, _ = last_lines(FileLog(metrics), 100, 10)
        curve = loss_curve(FileLog(metrics), 60)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert steps_of(steps) == list(range(1901, 2001))
    assert (evaluations, curve) == ([], [0.5])
    assert peak < 8 << 20
    assert bytes_read() - read_before < 64 << 20


def bytes_read():
    """What this process has read so far, of files and whatever else."""
    return int(Path("/proc/self/io").read_text().split()[1])
