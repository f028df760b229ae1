"""The ground floor: files whole or absent. What is opened in place of a file is in tools/test_hostile_files.py."""

import errno
import os
import subprocess
import sys

import pytest

from thermopile.storage import files
from thermopile.storage.files import (
    open_own,
    remove_leftovers,
    sync,
    write_atomically,
    writer_name,
    written_aside,
)


def test_an_own_file_is_made_and_opened_again(tmp_path):
    for text in (b"a", b"b"):
        descriptor = open_own(tmp_path / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, text)
        os.close(descriptor)
    assert (tmp_path / "log").read_bytes() == b"ab"


def test_a_link_in_place_of_the_file_is_replaced_and_not_followed(tmp_path):
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / "file").symlink_to(other)
    (tmp_path / f".file.{writer_name()}.partial").symlink_to(other)
    write_atomically(tmp_path / "file", b"new")
    assert (other.read_text(), (tmp_path / "file").read_text()) == ("precious", "new")
    assert not (tmp_path / "file").is_symlink()


def test_a_file_that_fails_half_way_leaves_the_one_before_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(TypeError), written_aside(tmp_path / "file") as file:
        file.writelines([b"half", None])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


@pytest.mark.parametrize("way", ["hard links", "no hard links"])
def test_a_file_that_may_not_replace_another_does_not(tmp_path, monkeypatch, way):
    if way == "no hard links":
        monkeypatch.setattr(os, "link", lambda path, to: refuse_link(path))
    write_atomically(tmp_path / "file", b"first", replace=False)
    with pytest.raises(FileExistsError, match="file"):
        write_atomically(tmp_path / "file", b"second", replace=False)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "first")]


def refuse_link(path):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)  # as exFAT does


def test_the_name_of_a_writer_is_its_own_even_among_containers_with_equal_pids():
    code = "import os; os.getpid = lambda: 7; from thermopile.storage.files import writer_name as n; print(n(), n())"
    names = [subprocess.check_output([sys.executable, "-c", code], text=True).split() for _ in range(2)]
    assert [len({*of_one}) for of_one in names] == [1, 1]
    assert names[0] != names[1]


def test_what_kills_left_of_files_is_removed_and_nothing_else(tmp_path):
    left = {".file.12.partial", f".file.{writer_name()}.partial"}
    for name in (*left, ".out.partial", "file.12.partial", ".file.12.partial.txt"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert not left & {path.name for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failing_sync_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "missing")
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        files.sync_file_system(-1)


def test_what_fails_halfway_is_not_synced(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "sync_file_system", lambda opened: pytest.fail("synced"))
    with pytest.raises(KeyError), files.written_through(tmp_path):
        raise KeyError
