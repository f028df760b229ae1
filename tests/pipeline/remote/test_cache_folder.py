"""A cache's folder: its own, gone with its process, and the next one removes what a killed one left."""

import secrets
import subprocess
import sys

import pytest

from thermopile.pipeline.remote.cache_folder import CacheFolder, cache_root
from thermopile.pipeline.remote.fetching import write
from thermopile.storage.lock import FileLock


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("THERMOPILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_two_caches_have_folders_of_their_own_and_a_removed_one_leaves_nothing(root):
    first, second = CacheFolder(), CacheFolder()
    (first.path / "file").write_bytes(b"x")
    assert first.path != second.path
    first.remove()
    second.remove()
    assert list(root.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(root):
    made = "from thermopile.pipeline.remote.cache_folder import CacheFolder; CacheFolder()"
    with subprocess.Popen(
        [sys.executable, "-c", f"{made}; print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        (folder,) = [path for path in root.iterdir() if path.is_dir()]
        (folder / "file").write_bytes(b"x")
        CacheFolder().remove()
        assert folder.exists()
        process.kill()
        process.wait()
    CacheFolder().remove()
    assert list(root.iterdir()) == []


def test_a_name_that_another_process_locks_while_it_cleans_up_is_not_used(root, monkeypatch):
    root.mkdir()
    cleaning = FileLock(root / "dataset-locked.lock")
    names = iter(["locked", "free"])
    monkeypatch.setattr(secrets, "token_hex", lambda size: next(names))
    folder = CacheFolder()
    assert folder.path == root / "dataset-free"
    folder.remove()
    cleaning.release()


def test_a_link_left_in_a_dead_cache_is_not_followed(root, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"x")
    root.mkdir()
    (root / "dataset-0.lock").touch()
    (root / "dataset-0").symlink_to(tmp_path / "precious")
    CacheFolder().remove()
    assert (tmp_path / "precious" / "file").exists()


def test_the_usual_place_is_the_users_cache(monkeypatch):
    monkeypatch.delenv("THERMOPILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(cache_root()) == "/somewhere/thermopile"


def test_a_write_for_which_there_is_no_space_names_the_file_and_the_setting(tmp_path, file_size_limit):
    path = tmp_path / "0"
    path.touch()
    with (
        file_size_limit(4096),
        pytest.raises(OSError, match=rf"{path} cannot be written: File too large\. Set THERMOPILE_CACHE to a"),
    ):
        write(path, [(8192, 0, 1)], b"x")
