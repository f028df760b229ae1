"""Parquet files that hold pictures, in Hugging Face's layout and plainer ones."""

import errno
import json
import os
import pickle
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.errors import BadSampleError, SourceError
from thermopile.pipeline.sources import parquet
from thermopile.pipeline.sources.parquet import ParquetSource

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NAMES = ["tench", "cock", "ray"]


@pytest.fixture
def write(tmp_path):
    """Writes a parquet file of these columns, with Hugging Face's notes of its features where there are some."""

    def write(name="data.parquet", rows=4, features=None, **columns):
        table = pa.table(columns)
        if features:
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / name, row_group_size=rows)
        return tmp_path / name

    return write


def images(*numbers):
    return pa.array([{"bytes": b"pixels %d" % n, "path": f"{n}.jpg"} for n in numbers], IMAGE)


CLASS_LABEL = {"label": {"names": NAMES, "_type": "ClassLabel"}, "image": {"_type": "Image"}}


def test_the_layout_of_hugging_face_is_read_with_its_class_names(write):
    files = [write(f"train-{i}.parquet", image=images(*range(5 * i, 5 * i + 5)), label=[2, 0, 1, 5, -1 if i else None],
                   features=CLASS_LABEL) for i in range(2)]  # fmt: skip
    source = ParquetSource(files)
    assert [source[i].picture for i in range(10)] == [b"pixels %d" % n for n in range(10)]
    assert [source[i].group for i in range(10)] == ["ray", "tench", "cock", None, None] * 2
    assert source.groups().names == (*NAMES, "")
    assert source.groups().of_sample.tolist() == [2, 0, 1, 3, 3] * 2
    assert (source.mode, source.uri(7), source.key(7)) == ("images", "train-1.parquet/2", "2")
    assert source.chunks().tolist() == [0, 4, 5, 9, 10]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_pictures_may_be_plain_bytes_and_captions_text_or_lists_of_it(write, kind):
    pictures = pa.array([b"a", b"b", b"c"], kind)
    source = ParquetSource([write(jpg=pictures, text=["A ", "B", "C"])])
    assert [(source[i].picture, source[i].caption) for i in range(3)] == [(b"a", "A"), (b"b", "B"), (b"c", "C")]
    for lists in (pa.list_(pa.string()), pa.list_(pa.string(), 2), pa.large_list(pa.large_string())):
        captions = pa.array([["A ", "other"], [" ", None], [None, "X"]], lists)
        source = ParquetSource([write(image=pictures, caption=captions)])
        assert source.mode == "pairs"
        assert [source[i].captions for i in (0, 2)] == [("A", "other"), ("X",)]
        with pytest.raises(BadSampleError, match="no caption; add one, or remove the sample"):
            source[1]
        assert list(source.captions(np.arange(3))) == ["A", "other", "X"]


def test_a_list_of_captions_that_is_empty_or_absurdly_long_is_a_bad_sample(write):
    captions = [[], [str(n) for n in range(64)], [str(n) for n in range(65)]]
    source = ParquetSource([write(image=images(1, 2, 3), caption=pa.array(captions, pa.list_(pa.string())))])
    assert len(source[1].captions) == 64
    for index, reason in ((0, "no caption; add one"), (2, "65 captions, above 64; keep the best 64")):
        with pytest.raises(BadSampleError, match=reason):
            source[index]


def test_the_first_of_several_columns_that_fits_is_taken_and_a_single_one_must_fit(write):
    file = write(image=images(1), text=["A"], label=[0.5], url=["http://"])
    source = ParquetSource([file])
    assert (source[0].caption, source[0].group) == ("A", "0.5")
    assert source.describe()["caption"] == "text"
    assert ParquetSource([file], caption=None).mode == "images"
    assert ParquetSource([file], caption="url")[0].caption == "http://"
    there = r"its columns: 'image' \(struct.*\), 'text' \(string\), 'label' \(double\), 'url' \(string\)"
    for options, reason in (({"caption": "label"}, f"no column 'label' of captions.*{there}"),
                            ({"image": "url"}, f"no column 'url' of pictures.*{there}"),
                            ({"image": "jpg;png"}, f"no pictures in any of jpg;png; {there}"),
                            ({"group": "gone"}, f"no column 'gone' of classes.*{there}")):  # fmt: skip
        with pytest.raises(SourceError, match=reason):
            ParquetSource([file], **options)


def test_classes_may_be_text_or_integers_without_names(write):
    source = ParquetSource([write(image=images(1, 2, 3), label=pa.array([10, 9, None], pa.int16()))])
    assert [source[i].group for i in range(3)] == ["10", "9", None]
    assert source.groups().names == ("", "9", "10")
    text = pa.array(["x", None, "x"]).dictionary_encode()
    source = ParquetSource([write(image=images(1, 2, 3), kind=text)], group="kind")
    assert [source[i].group for i in range(3)] == ["x", None, "x"]
    assert source.groups().of_sample.tolist() == [1, 0, 1]


@pytest.mark.parametrize("names", [None, 7, [1, 2], {"0": "x"}, ["x", ""]])
def test_class_names_that_are_none_are_passed_over(write, names):
    features = {"label": {"names": names}}
    assert ParquetSource([write(image=images(1), label=[5], features=features)])[0].group == "5"


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (pa.array([1.0, None, float("nan"), 0.0]), ["1", None, None, "0"]),  # as pandas writes integers with gaps
        (pa.array([True, False, None, True]), ["True", "False", None, "True"]),
        (pa.array([Decimal(2), None, Decimal("2.5"), Decimal(1)], pa.decimal128(9, 1)), ["2", None, "2.5", "1"]),
        (pa.array([0.1, 0.5, None, 3], pa.float32()), ["0.1", "0.5", None, "3"]),
        (pa.array([["a"], [], None, ["b"]]), ["a", None, None, "b"]),
        (pa.array(["a", "", None, "b"], pa.string_view()), ["a", None, None, "b"]),
    ],
)
def test_classes_are_numbers_or_texts_of_any_kind(write, labels, classes):
    source = ParquetSource([write(image=images(*range(4)), label=labels)])
    assert [source[i].group for i in range(4)] == classes
    groups = source.groups()
    assert [groups.names[number] or None for number in groups.of_sample] == classes


def test_a_column_without_any_class_is_told(write):
    source = ParquetSource([write(image=images(1, 2), label=[np.nan, None])])
    assert [source.groups(), source.groups(), source[0].group] == [None] * 3
    assert str(source.unused) == "; 1 × columns of classes without any class, such as label"


def test_names_of_classes_that_differ_between_files_are_those_of_each_file(write):
    files = [
        write(f"{i}.parquet", image=images(0, 1), label=[0, 1], features={"label": {"names": names}})
        for i, names in enumerate((["cat", "dog"], ["dog", "cat"]))
    ]
    source = ParquetSource(files)
    assert [source[i].group for i in range(4)] == ["cat", "dog", "dog", "cat"]
    assert source.groups().names == ("cat", "dog")
    assert source.groups().of_sample.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("name", ["caption", "captions", "text", "TEXT", "prompt", "sentences"])
def test_captions_are_found_under_the_names_that_people_give_them(write, name):
    of_lists, of_views = pa.array([["a", "b"], ["c"]]), pa.array(["a", "c"], pa.string_view())
    assert ParquetSource([write(image=images(0, 1), **{name: of_lists})])[0].captions == ("a", "b")
    assert ParquetSource([write(image=images(0, 1), **{name: of_views})])[1].captions == ("c",)


def test_bytes_are_captions_only_where_one_says_so(write):
    file = write(image=images(0), words=[b"caf\xc3\xa9"])
    assert ParquetSource([file]).mode == "images"
    assert ParquetSource([file], caption="words")[0].captions == ("café",)


@pytest.mark.parametrize(
    ("column", "features", "kind", "example", "cure"),
    [
        (("caption", [{"en": "x"}]), {}, "structs with text", "caption.en", "write it as a column of its own"),
        (("sentences", [[{"raw": "x", "sentid": 7}]]), {}, "structs with text", "sentences.raw", "a column of its"),
        (("conversations", [[{"value": "x", "turn": 1}]]), {}, "structs with text", "conversations.value", "own"),
        (("title", ["x"]), {}, "text", "title", "--caption title"),
        (("tags", [["x", "y"]]), {}, "text", "tags", "--caption tags"),
        (("words", pa.array(["x"], pa.string_view())), {}, "text", "words", "--caption words"),
        (("genre", pa.array(["x"]).dictionary_encode()), {}, "text", "genre", "--caption genre"),
        (("fine_label", [1]), {"fine_label": {"names": NAMES}}, "classes", "fine_label", "--group fine_label"),
        (("label", pa.array([1], pa.timestamp("s"))), {}, "classes that are neither", "label (timestamp[", ""),
        (("label", [b"x"]), {}, "classes that are neither numbers nor text", "label (binary)", ""),
        (("label", [{"id": 1}]), {}, "classes that are neither numbers nor text", "label (struct<id: int64>)", ""),
        (("cls", pa.nulls(1)), {}, "classes that are neither numbers nor text", "cls (null)", ""),
        (("caption", [7]), {}, "captions that are neither text nor lists of text", "caption (int64)", ""),
        (("captions", [[["x"]]]), {}, "captions that are neither text nor lists of text", "captions (list<", ""),
        (("text", pa.nulls(1)), {}, "captions that are neither text nor lists of text", "text (null)", ""),
    ],
)
def test_columns_as_published_sets_have_them_are_told_with_the_cure(write, column, features, kind, example, cure):
    name, values = column
    source = ParquetSource([write(image=images(1), features=features, **{name: values})])
    assert (source.mode, source.groups()) == ("images", None)
    ((told, (number, said, how)),) = source.unused.items()
    assert kind in told
    assert (number, said[: len(example)]) == (1, example)
    assert cure in how


@pytest.mark.parametrize(
    ("captions", "expected"),
    [
        (pa.array(["x", None]).dictionary_encode(), [("x",), None]),
        (pa.array(["x", ""], pa.large_string()), [("x",), None]),
        (pa.array([" x\n", "y "]), [("x",), ("y",)]),
        (pa.array([["x", None, "z"], []]), [("x", "z"), None]),
        (pa.array([["x"], ["y"]], pa.large_list(pa.string_view())), [("x",), ("y",)]),
        (pa.array([["x", "y"], ["", "z"]], pa.list_(pa.string(), 2)), [("x", "y"), ("z",)]),
        (pa.array([["x", "y"], ["z"]], pa.list_view(pa.string())), [("x", "y"), ("z",)]),
    ],
)
def test_captions_of_any_text_type_are_stripped_and_missing_ones_left_out(write, captions, expected):
    source = ParquetSource([write(image=images(0, 1), caption=captions)])
    for index, texts in enumerate(expected):
        if texts is None:
            with pytest.raises(BadSampleError, match="no caption"):
                source[index]
        else:
            assert source[index].captions == texts


def test_of_a_folder_hidden_files_are_not_read_and_others_are_counted(write, tmp_path):
    for name in ("train/0.parquet", "train/._0.parquet", ".cache/1.parquet", "__MACOSX/2.parquet"):
        write(name, image=images(1))
    (tmp_path / "train" / "dataset_infos.json").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "train")
    source = ParquetSource([tmp_path])
    assert (len(source), source.uri(0)) == (1, "0.parquet/0")
    counted = {kind: (each.number, each.cure) for kind, each in source.unused.items()}
    assert counted == {
        "hidden files": (3, ""),
        "files that end in .json": (1, ""),
        "files or links without a suffix": (1, ""),
    }
    assert len(ParquetSource([tmp_path / ".cache"])) == 1  # what somebody names is his own
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "0.arrow").touch()
    with pytest.raises(SourceError, match=r"no parquet files to read; 1 × files that end in \.arrow, such as 0\.arrow"):
        ParquetSource([tmp_path / "empty"])


def test_columns_of_text_that_no_sample_uses_are_told(write):
    file = write(image=images(0, 1), title=["a", "b"], set=["x", "y"], size=[1, 2], label=["c", "d"])
    for options, number, names, cure in (
        ({}, 2, "title, set", "--caption title for captions, --group title for classes"),
        ({"caption": "title"}, 1, "set", "--group set for classes"),
        ({"caption": "title", "group": "set"}, 1, "label", "--group label for classes"),
    ):
        unused = ParquetSource([file], **options).unused
        assert {kind: tuple(each) for kind, each in unused.items()} == {"columns of text": (number, names, cure)}


def test_a_path_is_followed_where_there_are_no_bytes_and_not_out_of_the_folder(write, tmp_path):
    (tmp_path / "data" / "images").mkdir(parents=True)
    (tmp_path / "data" / "images" / "1.jpg").write_bytes(b"pixels")
    (tmp_path / "data" / "out.jpg").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_bytes(b"secret")
    os.mkfifo(tmp_path / "data" / "pipe")
    paths = ["images/1.jpg", "../secret", str(tmp_path / "secret"), "out.jpg", "pipe", "images", "gone", "a\0b", None]
    column = pa.array([{"bytes": None, "path": path} for path in paths] + [None], IMAGE)
    source = ParquetSource([write("data/0.parquet", image=column)])
    assert source[0].picture == b"pixels"
    for index, reason in enumerate(["leads out of"] * 3 + ["not a regular"] * 2 + ["No such", "not the name"] +
                                   ["neither bytes nor a path"] * 2, 1):  # fmt: skip
        with pytest.raises(BadSampleError, match=reason):
            source[index]


def test_rows_within_a_chunk_are_read_from_the_file_once(write, monkeypatch):
    source = ParquetSource([write(image=images(*range(12)))])
    loaded = []
    load = source._load
    monkeypatch.setattr(source, "_load", lambda part: loaded.append(part) or load(part))
    for chunk in (2, 0, 1):
        for row in np.random.default_rng(0).permutation(4).tolist():
            assert source[4 * chunk + row].picture == b"pixels %d" % (4 * chunk + row)
    assert loaded == [2, 0, 1]


def test_row_groups_read_long_ago_are_let_go(write, monkeypatch):
    monkeypatch.setattr(parquet, "KEPT_BYTES", 1000)
    big = pa.array([b"x" * 600] * 8)
    source = ParquetSource([write(rows=1, image=big)])
    for index in range(8):
        assert len(source[index].picture) == 600
        assert len(source._kept) <= 3
    assert len(pickle.dumps(source)) < 2000


def test_a_row_group_too_large_is_answered_with_the_cure(write, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_ROW_GROUP_BYTES", 100_000)
    file = write(rows=100, image=[os.urandom(2000) for _ in range(100)])
    with pytest.raises(SourceError, match=r"row group 0 holds .* rewrite the file with smaller ones"):
        ParquetSource([file])


def test_a_row_group_of_few_bytes_that_unpacks_to_many_is_given_up(write, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_ROW_GROUP_BYTES", 1_000_000)
    source = ParquetSource([write(rows=5000, image=[b"x" * 10_000] * 5000)])
    unpacked = []
    batches = source._batches
    monkeypatch.setattr(source, "_batches",
                        lambda *args: (unpacked.append(batch.nbytes) or batch for batch in batches(*args)))  # fmt: skip
    for index in (0, 4999):
        with pytest.raises(BadSampleError, match="unpacks to more than"):
            source[index]
    assert sum(unpacked) < 1_500_000


def test_a_file_that_is_not_complete_parquet_is_refused(write, tmp_path):
    whole = write(image=images(*range(100)), rows=10).read_bytes()
    os.mkfifo(tmp_path / "pipe")
    for name, data in (("cut", whole[:-100]), ("text", b"hello"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SourceError, match="is no complete parquet file"):
            ParquetSource([tmp_path / name])
    for name in ("pipe", "gone"):
        with pytest.raises(SourceError, match="is not a file"):
            ParquetSource([tmp_path / name])
    with pytest.raises(SourceError, match=r"none of 1 parquet files, such as .*data\.parquet, has rows"):
        ParquetSource([write(image=images())])
    with pytest.raises(SourceError, match="no parquet files"):
        ParquetSource([])


def test_every_file_must_have_the_columns_of_the_first(write):
    files = [write("0.parquet", image=images(1), caption=["A"]), write("1.parquet", image=images(1), text=["A"])]
    with pytest.raises(SourceError, match=r"1\.parquet has no column 'caption'"):
        ParquetSource(files)


def test_a_row_group_damaged_in_the_middle_leaves_the_others_readable(write):
    file = write(image=pa.array([os.urandom(3000) for _ in range(12)]), caption=[f"caption {n}" for n in range(12)])
    metadata = pq.read_metadata(file)
    data = bytearray(file.read_bytes())
    for column in range(2):
        place = metadata.row_group(1).column(column).dictionary_page_offset
        data[place : place + 40] = b"\xff" * 40
    file.write_bytes(data)
    source = ParquetSource([file])
    for index in (4, 7):
        with pytest.raises(BadSampleError, match="its row group cannot be read"):
            source[index]
    assert [source[i].caption for i in (0, 3, 8, 11)] == ["caption 0", "caption 3", "caption 8", "caption 11"]
    assert list(source.captions(np.arange(12))) == [f"caption {n}" for n in (0, 1, 2, 3, 8, 9, 10, 11)]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_network_disk_that_fails_for_a_moment_costs_no_sample(write, monkeypatch, number):
    file = write(image=images(1, 2, 3, 4), text=["one", "two", "three", "four"])
    source = ParquetSource([file])

    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("thermopile.pipeline.sources.source_file.os.pread", fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            source[0]
        with pytest.raises(OSError, match=os.strerror(number)):
            list(source.captions(np.arange(4)))
    assert list(source.captions(np.arange(4))) == ["one", "two", "three", "four"]
    assert source[0].picture == b"pixels 1"


def test_text_that_is_not_utf8_is_a_bad_sample(write):
    text = pa.array([b"caf\xe9", b"tea"]).view(pa.string())
    source = ParquetSource([write(image=images(1, 2), caption=text)])
    with pytest.raises(BadSampleError, match="not UTF-8"):
        source[0]
    assert source[1].caption == "tea"
    assert list(source.captions(np.arange(2))) == ["tea"]


def test_other_rows_give_the_listing_another_digest(write):
    def listing(*numbers):
        return ParquetSource([write(image=images(*numbers))]).describe()["listing"]

    assert listing(1, 2, 3) == listing(1, 2, 3)
    assert listing(1, 2, 3) != listing(1, 2)
