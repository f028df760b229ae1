"""A folder of pictures as a source."""

import csv
import json

import numpy as np
import pytest

from thermopile.pipeline.errors import BadSampleError, SourceError
from thermopile.pipeline.sources import folder
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.listing import MAX_CAPTION_BYTES


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
    with pytest.raises(SourceError, match=r"holds no picture: .*; 1 × files that end in .txt, such as readme.txt"):
        FolderSource(tmp_path)


def listed(source):
    return [source.uri(i) for i in range(len(source))]


def told(source):
    return {kind: (each.number, each.example, each.cure) for kind, each in source.unused.items()}


def test_links_are_followed_to_a_folder_once_and_named(tmp_path):
    touch(tmp_path / "elsewhere" / "1.png", b"pixels")
    touch(tmp_path / "in" / "dogs" / "2.png")
    (tmp_path / "in" / "picture.png").symlink_to("../elsewhere/1.png")
    (tmp_path / "in" / "cats").symlink_to("../elsewhere")
    (tmp_path / "in" / "again").symlink_to("dogs")
    (tmp_path / "in" / "twice").symlink_to("../elsewhere")
    (tmp_path / "in" / "circle.png").symlink_to("circle.png")
    source = FolderSource(tmp_path / "in")
    assert listed(source) == ["cats/1.png", "circle.png", "dogs/2.png", "picture.png"]
    assert source[3].picture == b"pixels"
    with pytest.raises(BadSampleError, match="symbolic links"):
        source[1]
    assert source.notes == (f"the folder cats is a link to {tmp_path / 'elsewhere'}",)
    assert told(source) == {"links to folders that are listed already": (2, "again", "")}


def test_what_systems_and_tools_leave_in_a_folder_is_neither_class_nor_picture(tmp_path):
    for name in (".ipynb_checkpoints/a.jpg", "@eaDir/a.jpg", "__MACOSX/._a.jpg", "a/._1.jpg", "a/Thumbs.db", "a/1.jpg"):
        touch(tmp_path / name)
    source = FolderSource(tmp_path)
    assert listed(source) == ["a/1.jpg"]
    assert source.groups().names == ("a",)
    found = told(source)
    assert (found["hidden folders"][0], found["hidden files"][0]) == (3, 2)


def test_every_suffix_of_what_conversion_reads_is_a_picture_and_without_one_the_first_bytes_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "PICTURES", folder.PICTURES - folder.HEIC)  # as without the extra
    suffixes = ["apng", "avif", "bmp", "dib", "gif", "jfif", "jpe", "jpeg", "jpg", "pbm", "pgm", "pnm", "png", "ppm",
                "tif", "tiff", "webp", "JPG"]  # fmt: skip
    for suffix in suffixes:
        touch(tmp_path / f"x.{suffix}")
    starts = {"jpeg": b"\xff\xd8\xff\xe0", "png": b"\x89PNG\r\n\x1a\n", "gif": b"GIF89a", "tiff": b"II*\0",
              "bmp": b"BM", "webp": b"RIFF\0\0\0\0WEBP", "avif": b"\0\0\0\x20ftypavif"}  # fmt: skip
    for name, start in starts.items():
        touch(tmp_path / f"no_suffix_{name}", start + bytes(20))
    touch(tmp_path / "README", b"words")
    touch(tmp_path / "x.heic")
    source = FolderSource(tmp_path)
    assert listed(source) == sorted(
        [*(f"x.{suffix}" for suffix in suffixes), *(f"no_suffix_{name}" for name in starts)]
    )
    assert told(source) == {
        "files without a suffix, and no pictures": (1, "README", ""),
        "files that end in .heic": (1, "x.heic", "pip install 'thermopile[heic]'"),
    }


def test_captions_stand_in_files_beside_the_pictures(tmp_path):
    for name, text in {"1.txt": b"a dog\nan animal\n", "deep/2.txt": b"\xef\xbb\xbfa cat", "alone.txt": b"x"}.items():
        touch(tmp_path / name, text)
    for name in ("1.jpg", "deep/2.png", "3.jpg"):
        touch(tmp_path / name)
    assert told(FolderSource(tmp_path))["files that end in .txt"][::2] == (3, "--caption txt")
    source = FolderSource(tmp_path, caption="txt")
    assert source.mode == "pairs"
    assert (source[0].captions, source[2].captions) == (("a dog", "an animal"), ("a cat",))
    with pytest.raises(BadSampleError, match=r"caption 3\.txt: cannot be read: No such file"):
        source[1]
    assert [*source.captions(np.arange(3))] == ["a dog", "an animal", "a cat"]
    assert told(source) == {"files that end in .txt without a picture": (1, "alone.txt", "")}
    assert source.describe()["caption"] == "txt"
    with pytest.raises(SourceError, match=r"no file below .* that ends in \.caption has a picture of its name"):
        FolderSource(tmp_path, caption="caption")


@pytest.mark.parametrize(
    ("files", "counted"),
    [
        (["images/1.jpg", "labels/1.txt"], {".txt": 1}),  # YOLO
        (["train/1.jpg", "annotations/train.json", "annotations/val.json"], {".json": 2}),  # COCO
        (["JPEGImages/1.jpg", "Annotations/1.xml", "ImageSets/Main/train.txt"], {".xml": 1, ".txt": 1}),  # Pascal VOC
        (["0.jpg", "0.txt", "0.json", "1.jpg", "1.caption"], {".txt": 1, ".json": 1, ".caption": 1}),
        (["1.jpg", "film.mp4", "film.MP4"], {".mp4": 2}),
        (["1.jpg", "features.npy", "all.zip", "old.tar.gz"], {".npy": 1, ".zip": 1, ".gz": 1}),
        (["1.jpg", "drawing.svg", "raw.CR2", "new.jxl"], {".svg": 1, ".cr2": 1, ".jxl": 1}),
        (["1.jpg", "1.jpg.bak", "2.jpg~", "3.jpg.part"], {".bak": 1, ".jpg~": 1, ".part": 1}),
        (["1.jpg", "a/.DS_Store", "a/._1.jpg", "desktop.ini"], {"hidden files": 3}),
        (["1.jpg", ".Trash-1000/files/2.jpg", "$RECYCLE.BIN/3.jpg", ".thumbnails/4.png"], {"hidden folders": 3}),
        (["1.jpg", "train/metadata.csv", "test/metadata.jsonl", "README.md"], {".csv": 1, ".jsonl": 1, ".md": 1}),
        (["1.jpg", "LICENSE", "a.b/labels"], {"files without a suffix, and no pictures": 2}),
    ],
)
def test_whatever_else_the_folders_of_other_tools_hold_is_counted(tmp_path, files, counted):
    for name in files:
        touch(tmp_path / name)
    source = FolderSource(tmp_path)
    found = {kind.removeprefix("files that end in "): each.number for kind, each in source.unused.items()}
    assert found == counted
    assert len(source) + sum(counted.values()) == len(files)


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (["n01440764/n01440764_18.JPEG", "n01443537/1.JPEG"], ["n01440764", "n01443537"]),  # ImageNet
        (["train/cat/1.jpg", "train/dog/2.jpg", "test/cat/3.jpg"], ["test", "train"]),  # the first folder is the class
        (["0/1.png", "10/1.png", "2/1.png"], ["0", "2", "10"]),
        (["a b/1.jpg", "a.b/2.jpg", "é/3.jpg", "日本/4.jpg"], ["a b", "a.b", "é", "日本"]),
        (["cats/1.jpg", "Cats/2.jpg"], ["Cats", "cats"]),
        (["-r/1.jpg", "*/2.jpg", "~/3.jpg"], ["*", "-r", "~"]),
        (["a/.hidden/1.jpg", "a/1.jpg", ".b/2.jpg"], ["a"]),
        (["a/1.jpg", "empty/x.txt"], ["a"]),
        (["a.jpg/1.jpg", "b/1.jpg"], ["a.jpg", "b"]),  # a folder that is called like a picture
        (["a/1.jpg", "1.jpg"], ["", "a"]),
    ],
)
def test_classes_are_the_first_folders_of_any_name(tmp_path, names, classes):
    for name in names:
        touch(tmp_path / name)
    assert [*FolderSource(tmp_path).groups().names] == classes


METADATA = {
    "metadata.csv": b'file_name,text\n1.jpg,"a dog, running"\nsub/2.jpg,a cat\nnone.jpg,nobody\n',
    "metadata.jsonl": b'{"file_name": "1.jpg", "text": ["a dog, running", "an animal"]}\n\n'
    b'{"file_name": "sub/2.jpg", "text": "a cat"}\n'
    b'{"file_name": "none.jpg", "text": "nobody"}\n',
}


@pytest.mark.parametrize("name", METADATA)
def test_captions_stand_in_the_metadata_of_hugging_face(tmp_path, name):
    for picture in ("train/1.jpg", "train/sub/2.jpg", "train/3.jpg"):
        touch(tmp_path / picture)
    touch(tmp_path / "train" / name, METADATA[name])
    assert told(FolderSource(tmp_path))[f"files that end in .{name[9:]}"] == (1, f"train/{name}", "--caption metadata")
    source = FolderSource(tmp_path, caption="metadata")
    assert (source[0].caption, source[2].caption) == ("a dog, running", "a cat")
    assert source[0].further_captions == (("an animal",) if name.endswith("jsonl") else ())
    with pytest.raises(BadSampleError, match="no caption"):
        source[1]
    assert told(source) == {"rows of metadata without a picture": (1, "train/none.jpg", "")}
    before = source.describe()["listing"]
    touch(tmp_path / "train" / name, METADATA[name].replace(b"a cat", b"a bat"))
    assert FolderSource(tmp_path, caption="metadata").describe()["listing"] != before
    with pytest.raises(SourceError, match=r"needs the columns file_name and one of .* it has 'file_name', 'text'"):
        FolderSource(tmp_path, caption="metadata:words")


def test_every_row_and_column_of_metadata_is_used_or_counted(tmp_path):
    """Rows of one picture are its captions, from any file; a zero byte and a line break of Unicode are text."""
    touch(tmp_path / "1.jpg")
    touch(tmp_path / "2.jpg")
    touch(tmp_path / "metadata.csv", b"file_name,text,label\n1.jpg,a dog,3\n./1.jpg,an animal,3\n2.jpg,a\0cat,4\n")
    rows = [{"file_name": "2.jpg", "url": "x"}, {"file_name": "1.jpg", "text": ["one\u2028line\x85", None]}]
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    touch(tmp_path / "metadata.jsonl", lines.encode())
    source = FolderSource(tmp_path, caption="metadata")
    assert [sample.captions for sample in source] == [("a dog", "an animal", "one\u2028line"), ("a\0cat",)]
    assert told(source) == {"columns of metadata": (2, "label", "--caption metadata:COLUMN")}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("1.jpg,red, blue\n", "the row of '1.jpg' has more columns than the first line; quote texts with commas"),
        ('1.jpg,"a dog\n2.jpg,a cat\n', "cannot be read: Error: unexpected end of data"),
    ],
)
def test_rows_of_metadata_that_csv_cannot_hold_are_refused(tmp_path, rows, said):
    touch(tmp_path / "1.jpg")
    touch(tmp_path / "metadata.csv", f"file_name,text\n{rows}".encode())
    with pytest.raises(SourceError, match=rf"metadata\.csv:? {said}"):
        FolderSource(tmp_path, caption="metadata")


@pytest.mark.parametrize(
    ("columns", "twice"), [("file_name,text,text", "text"), ("file_name,file_name,text", "file_name")]
)
def test_metadata_with_two_columns_of_a_name_that_is_read_is_refused(tmp_path, columns, twice):
    touch(tmp_path / "1.jpg")
    touch(tmp_path / "metadata.csv", f"{columns}\n1.jpg,a dog,a cat\n".encode())
    with pytest.raises(SourceError, match=f"more than one column '{twice}'; rename or remove one"):
        FolderSource(tmp_path, caption="metadata")
    touch(tmp_path / "metadata.csv", b"file_name,text,,\n1.jpg,a dog,,\n")
    assert FolderSource(tmp_path, caption="metadata")[0].caption == "a dog"


def test_a_long_caption_of_metadata_costs_no_other_sample(tmp_path):
    """Python's csv reader refuses texts above 131,072 characters, unless a limit for the process says otherwise."""
    limit = csv.field_size_limit()
    for number, length in enumerate((5, 200_000, MAX_CAPTION_BYTES + 1)):
        touch(tmp_path / f"{number}.jpg")
        with (tmp_path / "metadata.csv").open("a") as file:
            file.write("file_name,text\n" * (number == 0) + f"{number}.jpg,{'x' * length}\n")
    source = FolderSource(tmp_path, caption="metadata")
    assert [len(source[number].caption) for number in range(2)] == [5, 200_000]
    with pytest.raises(BadSampleError, match="1,048,577 bytes, above 1,048,576"):
        source[2]
    assert csv.field_size_limit() == limit


def test_a_caption_of_metadata_that_is_no_text_is_refused_with_its_picture(tmp_path):
    touch(tmp_path / "1.jpg")
    touch(tmp_path / "metadata.jsonl", b'{"file_name": "1.jpg", "text": ["a dog", 5]}')
    with pytest.raises(SourceError, match=r"metadata\.jsonl: 'text' of '1\.jpg' is 5, and not text"):
        FolderSource(tmp_path, caption="metadata")


def test_captions_are_not_read_through_links(tmp_path):
    touch(tmp_path / "secret", b"of this machine")
    for name in ("1.jpg", "2.jpg", "1.txt"):
        touch(tmp_path / "in" / name, b"a dog")
    (tmp_path / "in" / "2.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(BadSampleError, match=r"caption 2\.txt: a link, and captions are not read through links"):
        FolderSource(tmp_path / "in", caption="txt")[1]
    (tmp_path / "in" / "metadata.csv").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match="captions are not read through links"):
        FolderSource(tmp_path / "in", caption="metadata")


def test_metadata_that_is_missing_or_broken_is_refused(tmp_path):
    touch(tmp_path / "1.jpg")
    with pytest.raises(SourceError, match=r"has neither metadata\.csv nor metadata\.jsonl"):
        FolderSource(tmp_path, caption="metadata")
    touch(tmp_path / "metadata.jsonl", b"{")
    with pytest.raises(SourceError, match=r"metadata\.jsonl cannot be read: JSONDecodeError"):
        FolderSource(tmp_path, caption="metadata")


def test_the_listing_has_another_digest_when_a_picture_has_come_or_gone(tmp_path):
    touch(tmp_path / "a.png")
    before = FolderSource(tmp_path).describe()["listing"]
    assert FolderSource(tmp_path).describe()["listing"] == before
    touch(tmp_path / "b.png")
    assert FolderSource(tmp_path).describe()["listing"] != before
    (tmp_path / "b.png").unlink()
    assert FolderSource(tmp_path).describe()["listing"] == before
