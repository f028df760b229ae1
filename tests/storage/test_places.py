"""What holds of every place: one suite, which a folder and an address inherit."""

from contextlib import suppress

import pytest
from obstore.store import MemoryStore

from thermopile.storage import bucket
from thermopile.storage.bucket import SCRATCH, Address
from thermopile.storage.local import LocalPath
from thermopile.storage.lock import LockedError, TakenOverError
from thermopile.storage.place import common_folder, leased, lock_at, lock_status, log_at, place_of, steps_in

FILES = ("tensors", "seal")


class PlaceTests:
    """`place` is a folder that does not exist yet, or an address with nothing below it."""

    def test_a_file_that_is_written_is_read_and_replaced(self, place):
        place.make()
        for data in (b"first", b"", b"second, and longer"):
            (place / "file").rewrite(data)
            assert (place / "file").read_bytes() == data
        with (place / "file").opened() as file:
            assert file.read() == b"second, and longer"
        assert (place / "file").modified() > 1e9

    def test_more_bytes_than_allowed_are_refused(self, place):
        place.make()
        (place / "file").rewrite(b"12345")
        with pytest.raises(OSError, match=r"5 bytes|limit"):
            (place / "file").read_bytes(4)

    def test_only_the_first_creates_a_file(self, place):
        place.make()
        (place / "file").create(b"first")
        with pytest.raises(FileExistsError):
            (place / "file").create(b"second")
        assert (place / "file").read_bytes() == b"first"

    def test_what_was_read_is_superseded(self, place):
        place.make()
        (place / "file").supersede(b"first", None)
        _, version = (place / "file").read_version()
        (place / "file").supersede(b"second", version)
        assert (place / "file").read_bytes() == b"second"

    def test_a_missing_file_is_missing_and_no_error_to_remove(self, place):
        place.make()
        file = place / "file"
        with pytest.raises(FileNotFoundError):
            file.read_bytes()
        assert (file.is_missing(), file.is_present()) == (True, False)
        place.remove(["file"])
        file.rewrite(b"")
        assert (file.is_missing(), file.is_present()) == (False, True)
        place.remove(["file", "other"])
        assert file.is_missing()

    def test_names_are_those_of_the_files_directly_in_it(self, place):
        assert place.names() == []
        (place / "below").make()
        for name in ("a", "b", "below/c"):
            (place / name).rewrite(b"123")
        assert sorted(place.names()) == ["a", "b"]
        assert sorted(place.content()) == ["a", "b", "below"]
        assert place.size_below() == 9
        assert list((place / "below").irregular_names()) == place.half_written() == []

    def test_a_complete_file_is_adopted_and_listed_with_its_size_and_version(self, place, tmp_path):
        (place / "below").make()
        versions = {}
        for name, data in (("a", b"123"), ("below/c", b"12345"), ("a", b"1")):
            (tmp_path / "complete").write_bytes(data)
            versions[name] = (len(data), (place / name).adopt(tmp_path / "complete"))
            assert not (tmp_path / "complete").exists()
        assert {name: (size, version) for name, size, version in place.listing()} == versions
        assert (place / "a").read_bytes() == b"1"

    def test_files_are_all_those_below(self, place):
        (place / "below").make()
        for name in ("a.tar", "below/c.tar"):
            (place / name).rewrite(b"")
        assert sorted(place.files()) == ["a.tar", "below/c.tar"]

    def test_a_folder_is_there_once_it_is_built(self, place):
        assert not place.holds("index")
        with place.built() as building:
            building.make()
            (building / "file").rewrite(b"content")
            assert not place.holds("index")
            (building / "index").rewrite(b"")
        assert place.holds("index")
        assert place.is_taken("index")
        assert (place / "file").read_bytes() == b"content"

    def test_a_mark_is_seen_until_it_is_removed_or_left_over(self, place):
        place.make()
        mark = place.mark("1")
        for removed in (lambda: mark.parent.remove([mark.name]), place.remove_leftovers):
            mark.create(b"")
            assert place.mark("1").is_seen()
            removed()
            assert not mark.is_seen()

    def test_files_are_on_this_machine_while_they_are_asked_for(self, place):
        place.make()
        for name in FILES:
            (place / name).rewrite(name.encode())
        with place.on_this_machine(FILES) as folder:
            assert [(folder / name).read_bytes() for name in FILES] == [b"tensors", b"seal"]
            assert folder.name == place.name

    def test_one_holder_has_the_lock(self, place):
        file, status = place / "lock", lambda: lock_status(place / "lock")
        place.make()
        assert status().holder is None
        lock = lock_at(file, TakenOverError, lambda: None)
        with pytest.raises(LockedError, match="held by pid"):
            lock_at(file, TakenOverError, lambda: None)
        assert status().is_held
        lock.release()
        assert not status().is_held

    def test_a_log_shows_its_lines_once_they_are_put(self, place):
        place.make()
        file = place.made_scratch() / "log"
        log = log_at(place / "parts", file)
        log.begin(resuming=False)
        file.write_bytes(b"one\ntwo\n")
        log.put()
        reader = log_at(place / "parts", file).opened()
        assert (reader.size, reader.read(4, 100)) == (8, b"two\n")
        assert log.modified() > 1e9

    def test_the_folder_of_a_step_appears_whole_and_is_removed_whole(self, place):
        place.make()
        steps = steps_in(place / "steps", FILES)
        assert steps.found() == {}
        for step in (5, 10, 10, 15):
            saved = steps.save(step, fill)
            assert saved == steps.found()[step]
        assert sorted(steps.found()) == [5, 10, 15]
        steps.remove(keep={10, 15})
        assert sorted(steps.found()) == [10, 15]
        assert (steps.found()[10] / "tensors").read_bytes() == b"tensors"

    def test_a_step_that_could_not_be_filled_is_not_found(self, place):
        def fail(folder):
            raise OSError("no space")

        place.make()
        steps = steps_in(place / "steps", FILES)
        with pytest.raises(OSError, match="no space"):
            steps.save(5, fail)
        assert steps.found() == {}

    def test_its_text_is_the_place_again(self, place):
        assert place_of(str(place)) == place_of(place) == place
        assert common_folder([place / "a" / "b", place / "a" / "c"]) == str(place / "a")


def fill(folder):
    for name in FILES:
        (folder / name).write_bytes(name.encode())


class TestLocalPath(PlaceTests):
    @pytest.fixture
    def place(self, tmp_path, monkeypatch):
        monkeypatch.setattr("thermopile.storage.local.SEEN_WITHIN_SECONDS", 0.2)  # or a missing mark takes 5 s
        return LocalPath(tmp_path / "folder")

    def test_its_holder_changes_it_as_it_is(self, place):
        place.make()
        lock = lock_at(place / "lock", TakenOverError, lambda: None)
        assert leased(place, lock) is place
        lock.release()

    def test_what_a_killed_block_left_is_not_in_what_the_next_builds(self, place):
        with suppress(KeyboardInterrupt), place.built() as building:
            building.make()
            (building / "left").touch()
            raise KeyboardInterrupt
        assert not place.exists()
        with place.built() as building:
            building.make()
        assert list(place.content()) == []

    def test_libraries_do_not_take_it_for_an_open_file(self, place):
        assert not {"read", "write", "seek"} & {*dir(place)}


class TestAddress(PlaceTests):
    @pytest.fixture
    def place(self, monkeypatch, tmp_path):
        store = MemoryStore()
        monkeypatch.setattr(bucket, "_store", lambda bucket, repeats=0: store)
        monkeypatch.setenv(SCRATCH, str(tmp_path))
        return Address("bucket", "folder")

    def test_its_holder_changes_it_under_the_lease_of_its_lock(self, place):
        lock = lock_at(place / "lock", TakenOverError, lambda: None)
        held = leased(place, lock)
        assert held == place
        assert held.lease is lock
        assert steps_in(held, FILES).save(5, fill).name == f"step-5.{lock.term}"
        lock.release()


class StoreTests(PlaceTests):
    """A server's answers, which a store in memory does not give."""

    more_than_a_page: int

    def test_a_version_is_the_same_wherever_it_is_told(self, place):
        file = place / "file"
        for version in (file.create(b"1"), file.replace(b"2", file.version()[1]), file.write(b"3")):
            assert version.strip('"')
        assert version == file.version()[1] == file.read_version()[1] == next(place.listing())[2]
        assert file.read_range(0, 1, version=version) == b"3"
        (place / "copy").copied(file)
        with pytest.raises(FileExistsError):
            file.read_range(0, 1, version=version.replace(version[1:5], "none"))

    def test_only_who_knows_the_version_replaces_a_file_which_may_be_gone(self, place):
        first = (place / "file").create(b"1")
        (place / "file").replace(b"2", first)
        for file in (place / "file", place / "gone"):
            with pytest.raises(FileExistsError, match="another process"):
                file.replace(b"3", first)
        assert (place / "file").read_bytes() == b"2"

    def test_files_are_removed_although_others_are_missing(self, place):
        names = [f"{number:04d}" for number in range(301)]  # more than a request has
        for name in names[::50]:
            (place / name).rewrite(b"")
        place.remove(names)
        assert place.names() == []

    def test_a_large_file_is_written_in_parts_and_listed_in_pages(self, place):
        data = bytes(range(256)) * (70_000)
        (place / "large").write(data)
        (place.with_name(f"{place.name}-beside") / "other").rewrite(b"")
        names = [f"{number:04d}" for number in range(self.more_than_a_page)]
        for name in names:
            (place / name).create(b"")
        assert [found[:2] for found in place.listing()] == [*((name, 0) for name in names), ("large", len(data))]
        assert (place / "copy").copied(place / "large")
        assert (place / "copy").read_bytes() == data


@pytest.mark.wide
class TestServer(StoreTests):
    more_than_a_page = 1100

    @pytest.fixture
    def place(self, s3, monkeypatch, tmp_path, request):
        monkeypatch.setenv(SCRATCH, str(tmp_path))
        return Address("bucket", request.node.originalname)


@pytest.mark.wide
class TestOtherCloud(StoreTests):
    more_than_a_page = 320

    @pytest.fixture
    def place(self, other_cloud, monkeypatch, tmp_path, request):
        monkeypatch.setenv(SCRATCH, str(tmp_path))
        return Address("bucket", request.node.originalname, scheme=other_cloud)
