"""A folder that is cut, brought piece by piece, and joined: as it was, or one line that says what is wrong with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from thermopile.benchmarks.pieces import DIGESTS, FOR_DIGESTS, cut, gather, join

CHECKOUT = Path(__file__).parents[2]
SPACE = 30_000
"""Bytes of a piece."""


@pytest.fixture
def folder(tmp_path):
    """95 KB: a wheel larger than a piece, an empty one, and a folder."""
    folder = tmp_path / "wheels"
    (folder / "pairs").mkdir(parents=True)
    (folder / "large.whl").write_bytes(os.urandom(80_000))
    (folder / "empty.whl").touch()
    (folder / "pairs" / "one.png").write_bytes(os.urandom(15_000))
    return folder


@pytest.fixture
def pieces(folder):
    return cut(folder, FOR_DIGESTS + SPACE)


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def refused(function, *words):
    with pytest.raises(SystemExit) as error:
        function(*words)
    return str(error.value)


def test_what_was_cut_is_joined_whatever_the_order_and_the_pieces_are_gone(folder, pieces, tmp_path):
    for piece in (pieces[2], pieces[0], *pieces):
        gather(piece, tmp_path / "to")
    join(tmp_path / "to")
    assert contents(tmp_path / "to") == contents(folder)
    join(tmp_path / "to")  # there is nothing to join any more
    assert contents(tmp_path / "to") == contents(folder)


def test_no_folder_holds_more_than_asked_and_those_of_an_earlier_cut_are_gone(folder, pieces, tmp_path):
    assert len(pieces) > 3
    assert {each.parent for each in pieces} == {tmp_path}
    assert all(sum(map(len, contents(each).values())) <= FOR_DIGESTS + SPACE for each in pieces)
    (folder / "large.whl").unlink()
    (tmp_path / "wheels-x").mkdir()
    assert cut(folder, FOR_DIGESTS + SPACE) == pieces[:2]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["wheels", "wheels-1", "wheels-2", "wheels-x"]


def test_wheels_of_an_earlier_time_are_gone_after_joining(folder, pieces, tmp_path):
    for piece in pieces:
        gather(piece, tmp_path / "to")
    (tmp_path / "to" / "older.whl").touch()
    join(tmp_path / "to")
    assert contents(tmp_path / "to") == contents(folder)


def test_lacking_pieces_are_named_and_nothing_is_joined(pieces, tmp_path):
    for piece in (pieces[0], pieces[3]):
        gather(piece, tmp_path / "to")
    line = refused(join, tmp_path / "to")
    assert line == (
        f"{tmp_path}/to: it lacks 2, 3 of 4 pieces; bring them with `python3 -m benchmarks.pieces gather`"
    )  # fmt: skip
    assert sorted(contents(tmp_path / "to")) == [DIGESTS, "piece-1", "piece-4"]


def test_a_piece_that_changed_on_the_way_is_not_taken_over(pieces, tmp_path):
    data = (pieces[1] / "piece-2").read_bytes()
    (pieces[1] / "piece-2").write_bytes(data[:-1])
    assert refused(gather, pieces[1], tmp_path / "to") == f"{pieces[1]}: not as cut 2; bring it again"
    assert not (tmp_path / "to").exists()


def test_a_piece_that_changed_where_it_waited_is_not_joined(pieces, tmp_path):
    for piece in pieces:
        gather(piece, tmp_path / "to")
    with (tmp_path / "to" / "piece-3").open("r+b") as file:
        file.write(b"?")
    assert refused(join, tmp_path / "to") == f"{tmp_path}/to: not as cut 3; bring it again"
    assert not list((tmp_path / "to").glob("*.whl"))
    gather(pieces[2], tmp_path / "to")
    join(tmp_path / "to")


def test_pieces_of_two_cuts_are_not_mixed(folder, pieces, tmp_path):
    gather(pieces[0], tmp_path / "to")
    (folder / "empty.whl").write_bytes(b"other")
    other = cut(folder, FOR_DIGESTS + SPACE)
    line = refused(gather, other[1], tmp_path / "to")
    assert line == f"{other[1]}: its pieces do not belong to those in {tmp_path}/to; empty that folder, and begin again"


@pytest.mark.parametrize(
    ("digests", "why"),
    [
        (None, "No such file or directory"),
        (b"", "it holds no digests"),
        (b"0\n" * 9, "it holds no digests"),
        (b"\xff", "it is no text"),
    ],
    ids=["none", "empty", "short", "binary"],
)
def test_a_folder_without_pieces_or_with_a_broken_list_of_them_is_one_line(tmp_path, digests, why):
    if digests is not None:
        (tmp_path / DIGESTS).write_bytes(digests)
    assert refused(gather, tmp_path, tmp_path / "to").startswith(f"{tmp_path / DIGESTS}: {why}; name a folder")
    (tmp_path / DIGESTS).write_text("0" * 64)
    assert refused(gather, tmp_path, tmp_path / "to").startswith(f"{tmp_path}: it holds no piece; ")


def test_the_commands_say_what_is_to_be_brought_and_what_is_lacking(folder, tmp_path):
    def said(*words):
        command = [sys.executable, "-S", "-m", "benchmarks.pieces", *map(str, words)]  # -S: no installed package
        return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout

    assert said("cut", folder) == f"to bring one after another, of 45 MB at most: {folder}-1\n"
    cut(folder, FOR_DIGESTS + SPACE)
    assert said("gather", f"{folder}-3", tmp_path / "to") == f"{tmp_path}/to: 1 of 4 pieces; lacking 1, 2, 4\n"
    for number in (1, 2):
        gather(Path(f"{folder}-{number}"), tmp_path / "to")
    assert said("gather", f"{folder}-4", tmp_path / "to") == f"{tmp_path}/to: 4 of 4 pieces\n"
