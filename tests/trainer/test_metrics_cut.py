"""metrics.jsonl taken back to a step: the later lines go, and no good one because of a bad one."""

import json
import os
import random
import tracemalloc

import pytest

from thermopile.storage.sealed_json import seal_line
from thermopile.trainer.metrics import metrics_file
from thermopile.trainer.metrics.metrics_file import cut_back


def line(step, **more):
    return seal_line({"step": step, "loss": 1.0 / step, **more}) + b"\n"


LINES = [line(step) for step in range(1, 21)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(LINES))
    return path


@pytest.fixture
def aside(tmp_path):
    return tmp_path / "metrics.damaged.jsonl"


@pytest.mark.parametrize("keep", [0, 1, 13, 20, 99])
def test_the_lines_of_later_steps_go_and_the_last_one_left_is_returned(path, aside, keep, caplog):
    last = cut_back(path, keep)
    assert path.read_bytes() == b"".join(LINES[:keep])
    assert last == b"".join(LINES[:keep][-1:]).rstrip(b"\n")
    assert not aside.exists()
    assert not caplog.records


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace(b'"step": 13', b'"step": 93'),
        lambda text: text.replace(b"0.1,", b"0.9,"),
        lambda text: text.replace(LINES[12], b"[" * 100_000 + b"\n"),
        lambda text: text.replace(LINES[12], b"\0\xff\n\n{}\n"),
        lambda text: text.replace(LINES[12], LINES[12].rstrip(b"\n")),
        lambda text: text.replace(LINES[12], b'{"step": 13, "loss": 1.0}\n'),
        lambda text: text.replace(LINES[12], bytes(5 << 20)),
    ],
)
def test_a_line_that_cannot_be_read_is_set_aside_with_a_warning_and_all_others_stay(path, aside, caplog, damage):
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    last = cut_back(path, 18)
    left = path.read_bytes().splitlines(keepends=True)
    assert last + b"\n" == left[-1] == LINES[17]
    gone = [each for each in LINES[:18] if each not in left]
    assert left == [each for each in LINES[:18] if each not in gone]
    assert len(gone) <= 2
    moved = aside.read_bytes()
    assert [each for each in moved.split(b"\n") if each] != []
    (warning,) = caplog.messages
    assert warning.startswith(str(path))
    assert "cannot be read and moved to" in warning
    assert str(aside) in warning


def test_what_was_set_aside_before_stays_there(path, aside):
    aside.write_bytes(b"older\n")
    path.write_bytes(b"newer\n" + LINES[0])
    cut_back(path, 5)
    assert (aside.read_bytes(), path.read_bytes()) == (b"older\nnewer\n", LINES[0])


def test_half_a_line_at_the_end_is_set_aside_and_a_whole_one_without_its_end_is_kept(path, aside):
    path.write_bytes(b"".join(LINES[:3]) + LINES[3][:20])
    cut_back(path, 9)
    assert (path.read_bytes(), aside.read_bytes()) == (b"".join(LINES[:3]), LINES[3][:20] + b"\n")
    path.write_bytes(b"".join(LINES[:3]).rstrip(b"\n"))
    assert cut_back(path, 9) == LINES[2].rstrip(b"\n")
    assert path.read_bytes() == b"".join(LINES[:3])


def test_half_a_line_at_the_end_is_cut_off_in_place_even_on_a_full_disk(path, aside, file_size_limit):
    path.write_bytes(b"".join(LINES) + LINES[3][:20])
    with file_size_limit(100):
        cut_back(path, 20)
    assert (path.read_bytes(), aside.read_bytes()) == (b"".join(LINES), LINES[3][:20] + b"\n")


def test_later_lines_between_earlier_ones_go_too(path, aside):
    path.write_bytes(LINES[0] + LINES[9] + LINES[1])
    cut_back(path, 5)
    assert path.read_bytes() == LINES[0] + LINES[1]
    assert not aside.exists()


def test_a_flipped_bit_costs_no_line_but_its_own_and_its_neighbour_and_is_told(path, aside, caplog):
    whole = path.read_bytes()
    for place in random.Random(2).sample(range(8 * len(whole)), 60):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        caplog.clear()
        cut_back(path, 20)
        left = path.read_bytes().splitlines(keepends=True)
        assert [each for each in LINES if each in left] == left
        assert len(left) >= 18
        assert str(path) in caplog.text or left == LINES


def test_a_kill_at_any_write_loses_no_line(path, aside, monkeypatch):
    path.write_bytes(b"damaged\n" + path.read_bytes())
    before = path.read_bytes()
    monkeypatch.setattr(metrics_file.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        cut_back(path, 5)
    assert path.read_bytes() == before
    monkeypatch.undo()
    cut_back(path, 5)
    assert path.read_bytes() == b"".join(LINES[:5])
    assert sorted(each.name for each in path.parent.iterdir()) == ["metrics.damaged.jsonl", "metrics.jsonl"]


def test_memory_does_not_grow_with_the_file(path):
    with path.open("wb") as file:
        file.write(b"damaged\n")
        file.writelines(line(step, filler="x" * 500) for step in range(1, 8001))
        file.write(bytes(16 << 20))
    tracemalloc.start()
    try:
        cut_back(path, 7000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert json.loads(path.read_bytes().splitlines()[-1])["step"] == 7000
    assert peak < 6 << 20


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.with_name("other")), os.mkdir])
@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.damaged.jsonl"])
def test_nothing_is_written_through_a_link_and_a_pipe_holds_nothing_up(path, name, make):
    (path.parent / "other").write_bytes(b"damaged\n" + LINES[3])
    path.write_bytes(b"damaged\n" + LINES[3])
    (path.parent / name).unlink(missing_ok=True)
    make(path.parent / name)
    with pytest.raises(OSError, match=name):
        cut_back(path, 1)
    assert (path.parent / "other").read_bytes() == b"damaged\n" + LINES[3]
