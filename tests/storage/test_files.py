"""The ground floor: regular files only, nothing written through a link, files whole or absent."""

import errno
import os
import socket
import subprocess
import sys

import pytest

from thermopile.storage import files
from thermopile.storage.files import (
    NotRegularFileError,
    open_own,
    open_regular,
    own_directory,
    read_regular,
    remove_leftovers,
    sync,
    write_atomically,
    writer_name,
    written_aside,
)


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def link_to_device(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_socket, link_to_device, os.mkdir], ids=lambda make: make.__name__)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path, make):
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(OSError, match=r"thing|No such device"):
        open_regular(path)
    with pytest.raises(OSError, match=r"thing|No such device"):
        os.close(open_own(path, os.O_RDWR))


def test_reading_follows_links_and_is_bounded(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"12345"
    with pytest.raises(OSError, match="larger than the limit for such a file, 4 bytes"):
        read_regular(tmp_path / "link", max_bytes=4)


@pytest.mark.parametrize("make", ["symlink_to", "hardlink_to"])
def test_a_file_that_is_a_link_or_has_a_second_name_is_not_opened_for_writing(tmp_path, make):
    other = tmp_path / "other"
    other.write_text("precious")
    getattr(tmp_path / "link", make)(other)
    with pytest.raises(NotRegularFileError, match="link"):
        open_own(tmp_path / "link", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    assert other.read_text() == "precious"


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


@pytest.mark.parametrize("make", [make_pipe, make_socket, os.mkdir], ids=lambda make: make.__name__)
def test_a_device_and_its_like_are_not_replaced(tmp_path, make):
    make(tmp_path / "thing")
    before = (tmp_path / "thing").lstat()
    with pytest.raises(NotRegularFileError, match="which a file cannot replace"):
        write_atomically(tmp_path / "thing", b"new")
    assert (tmp_path / "thing").lstat().st_ino == before.st_ino
    assert len(list(tmp_path.iterdir())) == 1


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


def test_a_directory_that_is_a_link_or_a_file_is_refused(tmp_path):
    assert own_directory(tmp_path / "new").is_dir()
    assert own_directory(tmp_path / "new").is_dir()
    (tmp_path / "link").symlink_to(tmp_path / "new")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(NotRegularFileError, match=name):
            own_directory(tmp_path / name)


def test_a_failing_sync_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "missing")
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        files.sync_file_system(-1)


def test_what_fails_halfway_is_not_synced(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "sync_file_system", lambda opened: pytest.fail("synced"))
    with pytest.raises(KeyError), files.written_through(tmp_path):
        raise KeyError
