"""Where caches have their folders; that each is its process's own is in tests/storage/test_lock.py."""

import pytest

from thermopile.pipeline.remote.fetching import write
from thermopile.pipeline.remote.samples import cache_root


def test_the_usual_place_is_the_users_cache(monkeypatch):
    monkeypatch.delenv("THERMOPILE_CACHE", raising=False)
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
