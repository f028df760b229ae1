"""A folder of pictures as a source."""

import os

import pytest

from thermopile.pipeline.errors import BadSampleError, SourceError
from thermopile.pipeline.sources.folder import FolderSource


def touch(path, data=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_pictures_are_listed_in_the_order_of_their_names_and_other_files_are_not(tmp_path):
    for name in ("b/2.png", "a/9.JPG", "a/10.jpeg", "notes.txt", "c.webp"):
        touch(tmp_path / name)
    source = FolderSource(tmp_path)
    assert [source.uri(i) for i in range(len(source))] == ["a/10.jpeg", "a/9.JPG", "b/2.png", "c.webp"]


def test_the_first_folder_on_the_way_is_the_class_and_a_flat_picture_has_none(tmp_path):
    for name in ("cats/deep/1.png", "dogs/2.png", "3.png"):
        touch(tmp_path / name)
    source = FolderSource(tmp_path)
    assert {source[i].uri: source[i].group for i in range(3)} == {
        "cats/deep/1.png": "cats", "dogs/2.png": "dogs", "3.png": None,
    }  # fmt: skip


def test_the_classes_are_sorted_by_name_though_the_listing_is_sorted_by_path(tmp_path):
    for name in ("a/1.png", "a-b/2.png", "a/3.png", "z.png"):
        touch(tmp_path / name)
    source = FolderSource(tmp_path)
    assert [source.uri(i) for i in range(4)] == ["a-b/2.png", "a/1.png", "a/3.png", "z.png"]
    assert source.groups().names == ("", "a", "a-b")
    assert source.groups().of_sample.tolist() == [2, 1, 1, 0]


def test_a_flat_folder_has_no_classes(tmp_path):
    touch(tmp_path / "1.png")
    assert FolderSource(tmp_path).groups() is None


def test_a_missing_folder_and_one_without_pictures_are_refused(tmp_path):
    with pytest.raises(SourceError, match="not a folder"):
        FolderSource(tmp_path / "nowhere")
    touch(tmp_path / "readme.txt")
    with pytest.raises(SourceError, match="holds no picture"):
        FolderSource(tmp_path)


def test_a_circle_of_links_is_not_walked(tmp_path):
    touch(tmp_path / "a" / "1.png")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert len(FolderSource(tmp_path)) == 1


def test_links_to_pictures_are_followed_and_links_to_folders_are_not(tmp_path):
    touch(tmp_path / "elsewhere" / "1.png", b"pixels")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "picture.png").symlink_to("../elsewhere/1.png")
    (tmp_path / "in" / "folder.png").symlink_to("../elsewhere")
    (tmp_path / "in" / "circle.png").symlink_to("circle.png")
    source = FolderSource(tmp_path / "in")
    assert [source.uri(i) for i in range(len(source))] == ["circle.png", "picture.png"]
    assert source[1].picture == b"pixels"
    with pytest.raises(BadSampleError, match="symbolic links"):
        source[0]


def test_the_listing_has_another_digest_when_a_picture_has_come_or_gone(tmp_path):
    touch(tmp_path / "a.png")
    before = FolderSource(tmp_path).describe()["listing"]
    assert FolderSource(tmp_path).describe()["listing"] == before
    touch(tmp_path / "b.png")
    assert FolderSource(tmp_path).describe()["listing"] != before
    (tmp_path / "b.png").unlink()
    assert FolderSource(tmp_path).describe()["listing"] == before


def test_a_name_that_is_not_utf8_is_read_and_shown_escaped(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.png")
    with open(path, "wb") as file:
        file.write(b"pixels")
    source = FolderSource(tmp_path)
    assert source[0].picture == b"pixels"
    assert source[0].uri == r"caf\xe9.png"


def test_a_picture_that_is_gone_is_a_bad_sample(tmp_path):
    touch(tmp_path / "1.png")
    source = FolderSource(tmp_path)
    (tmp_path / "1.png").unlink()
    with pytest.raises(BadSampleError, match="No such file"):
        source[0]


def test_a_pipe_with_the_name_of_a_picture_is_a_bad_sample_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "z.jpg")
    with pytest.raises(BadSampleError, match="not a regular file"):
        FolderSource(tmp_path)[0]
