"""Generated messy sources: what is listed is stored, left out or counted, and independent readers agree with the rest.

The readers are csv, pyarrow, tarfile, os.walk and Pillow.
"""

import csv
import io
import os
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from thermopile.pipeline.conversion.marker import read_bad_samples
from thermopile.pipeline.errors import SourceError
from thermopile.pipeline.sources.csv_source import CsvSource
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.pipeline.sources.webdataset import WebDatasetSource
from thermopile.storage.local import LocalPath

from support.conversions import dataset_of
from support.pictures import as_bytes, draw

JPEG, PNG = (as_bytes(draw(seed), kind) for seed, kind in ((1, "JPEG"), (2, "PNG")))
SOUND = (JPEG, PNG, as_bytes(draw(4).convert("L"), "PNG"), as_bytes(draw(5).quantize(64), "GIF"))
DAMAGED = (b"", b"no picture", PNG[:60], b"<html>")
PICTURES = st.sampled_from(SOUND * 2 + DAMAGED)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufeff\x00"), max_size=12)
CAPTIONS = st.one_of(
    st.sampled_from(["a dog", "a dog", '"Keep calm" poster', '"', "a, b", " é ", "", " ", "it's"]), TEXT
)
CLASSES = st.sampled_from(["cat", "dog", "", "10", "9", "ä"])
EXAMPLES = pytest.mark.parametrize("examples", [3, pytest.param(200, marks=pytest.mark.wide)])


def check(examples, holds, **strategies):
    """Let `holds` be true for so many examples."""
    settings(max_examples=examples, deadline=None, suppress_health_check=[*HealthCheck])(given(**strategies)(holds))()


class Converted:
    """The dataset of a source: its samples by uri or key, and the names of those that were left out."""

    def __init__(self, source, out, name="uri"):
        self.dataset = dataset_of(source, out, max_error_rate=1.0)
        table = self.dataset.take(np.arange(self.dataset.n), ["uri", "key", "captions", "group"])
        self.stored = {row[name]: row | {"sample_id": number} for number, row in enumerate(table.to_pylist())}
        self.left_out = [getattr(sample, name) for sample in read_bad_samples(self.dataset.place / "errors.jsonl")]
        self.not_used = {kind: each["number"] for kind, each in self.dataset.index.source.get("not_used", {}).items()}
        assert len(self.stored) == self.dataset.n

    def holds(self, name, picture, captions=(), group=None):
        """Assert that a stored sample is as an independent reader has it."""
        row = self.stored[name]
        assert row["captions"] == [text for text in map(str.strip, captions) if text]
        assert row["group"] == (group or None)
        if (jpeg := self.dataset.jpeg(row["sample_id"])) != picture:
            with Image.open(io.BytesIO(picture)) as image, Image.open(io.BytesIO(jpeg)) as stored:
                assert image.format != "JPEG"
                assert np.abs(np.asarray(stored, float) - np.asarray(image.convert("RGB"), float)).mean() < 8


def usable(picture, *captions):
    return picture in SOUND and any(caption and caption.strip() for caption in captions)


ROWS = st.lists(st.tuples(PICTURES, CAPTIONS, CLASSES, st.integers(0, 9)), max_size=8)
DIALECTS = st.tuples(st.sampled_from(",\t;"), st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONE]),
                     st.sampled_from(["\n", "\r\n"]))  # fmt: skip


@EXAMPLES
def test_of_a_messy_list_every_row_is_stored_or_left_out(examples, tmp_path_factory):
    def holds(rows, dialect):
        root, (separator, quoting, end) = tmp_path_factory.mktemp("list"), dialect
        file, rows = root / "list.csv", [*rows, (PNG, "the end", "cat", 1)]
        for number, (picture, _, _, kind) in enumerate(rows):
            if kind:  # else the file is missing
                (root / f"{number}.bin").write_bytes(picture)
        table = [[f"{number}.bin", caption, group] for number, (_, caption, group, _) in enumerate(rows)]
        for number, (*_, kind) in enumerate(rows):
            if kind == 9:
                del table[number][2]  # too few columns
        with file.open("w", newline="", encoding="utf-8") as written:
            if quoting == csv.QUOTE_NONE:
                assume(not any({separator, "\r", "\n"} & {*text} for row in table for text in row))
                written.writelines(separator.join(row) + end for row in [["filepath", "title", "class"], *table])
            else:
                writer = csv.writer(written, delimiter=separator, quoting=quoting, lineterminator=end)
                writer.writerows([["filepath", "title", "class"], *table])
        try:
            source = CsvSource(file, group="class", separator=separator)
        except SourceError as error:  # an unclosed quote in a list that has rows of other lengths as well
            assert quoting == csv.QUOTE_NONE
            assert "--quoting none" in str(error)  # noqa: PT017
            source = CsvSource(file, group="class", separator=separator, quoting="none")
        read = csv.QUOTE_NONE if source.describe().get("quoting") == "none" else csv.QUOTE_MINIMAL
        with file.open(newline="", encoding="utf-8") as opened:
            listed = [*csv.reader(opened, delimiter=separator, quoting=read)][1:]
        found = Converted(source, root / "out")
        sound = {row[0]: row for row in listed if len(row) == 3 and (root / row[0]).is_file()}
        wanted = {name for name, row in sound.items() if usable((root / name).read_bytes(), row[1])}
        assert {*found.stored} == wanted
        assert len(found.stored) + len(found.left_out) == len(listed)
        for name in wanted:
            found.holds(name, (root / name).read_bytes(), [sound[name][1]], sound[name][2].strip())

    check(examples, holds, rows=ROWS, dialect=DIALECTS)


COLUMNS = st.fixed_dictionaries({
    "nested": st.booleans(), "lists": st.booleans(), "others": st.sets(st.sampled_from(["set", "source", "width"])),
    "group": st.sampled_from(["label", "cls", "kind"]), "rows": st.integers(1, 4),
})  # fmt: skip


@EXAMPLES
def test_of_messy_parquet_every_row_is_stored_or_left_out_and_every_column_of_text_counted(examples, tmp_path_factory):
    def holds(rows, columns):
        root = tmp_path_factory.mktemp("parquet")
        rows = [*rows, (PNG, "the end", "cat", 1)]
        numbers = range(len(rows))
        pictures = [None if kind == 0 else picture for picture, _, _, kind in rows]
        captions = [None if kind == 9 else caption for _, caption, _, kind in rows]
        if columns["nested"]:
            pictures = [{"bytes": each, "path": None} for each in pictures]
        if columns["lists"]:
            captions = [None if each is None else [each, None, "more"][: len(each) % 4] for each in captions]
        table = {
            "image": pictures,
            "caption": captions,
            columns["group"]: [group or None for _, _, group, _ in rows],
            **{name: numbers if name == "width" else [str(number) for number in numbers] for name in columns["others"]},
        }
        half = len(rows) // 2
        for name, part in (("0", slice(0, half)), ("1", slice(half, None))):
            written = pa.table(table).slice(part.start, part.stop and part.stop - part.start)
            if len(written):
                pq.write_table(written, root / f"{name}.parquet", row_group_size=columns["rows"])
        files = sorted(root.glob("*.parquet"))
        found = Converted(ParquetSource(files), root / "out")
        listed = {
            f"{file.name}/{row}": value for file in files for row, value in enumerate(pq.read_table(file).to_pylist())
        }
        wanted = set()
        for name, row in listed.items():
            picture, texts = row["image"], row["caption"]
            picture = picture["bytes"] if columns["nested"] else picture
            texts = [text for text in (texts if isinstance(texts, list) else [texts]) if text]
            if usable(picture, *texts):
                wanted.add(name)
                found.holds(name, picture, texts, row.get("label") or row.get("cls"))
        assert {*found.stored} == wanted
        assert {*found.stored, *found.left_out} == {*listed}
        text = (columns["others"] - {"width"}) | {columns["group"]} - {"label", "cls"}
        assert found.not_used == ({"columns of text": len(text)} if text else {})

    check(examples, holds, rows=ROWS, columns=COLUMNS)


BESIDE = st.sets(st.sampled_from(["json", "caption", "1.txt", "1.png", "tif", "npy", "xml"]))
"""Suffixes beside a sample; of these, npy and xml are neither pictures nor texts."""
KEYS = st.lists(st.tuples(PICTURES, CAPTIONS, CLASSES, st.integers(0, 9), BESIDE), max_size=8)


@EXAMPLES
def test_of_messy_tars_every_key_is_stored_or_left_out_and_every_picture_or_text_beside_it_counted(
    examples, tmp_path_factory
):
    def holds(keys):
        root = tmp_path_factory.mktemp("tars")
        counted = 0
        for number, (picture, caption, group, kind, beside) in enumerate([*keys, (PNG, "the end", "cat", 1, set())]):
            key, texts = f"dir/{number}", caption.encode()
            members = {"png": picture, "txt": texts, "cls": group.encode()}
            if kind == 0:
                del members["png"]  # and so there is no sample
            elif kind == 9:
                members["txt"] = b"\xff\xfe\xfa"  # no UTF-8
            elif usable(picture, *caption.split("\n")):
                members |= dict.fromkeys(sorted(beside), PNG)
                counted += len(beside - {"npy", "xml"})
            with tarfile.open(root / f"{number % 2}.tar", "a") as tar:
                for suffix, data in members.items():
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        found = Converted(WebDatasetSource([LocalPath(root)]), root / "out", "key")
        listed = {}
        for file in root.glob("*.tar"):
            with tarfile.open(file) as tar:
                for member in tar:
                    folder, _, base = member.name.rpartition("/")
                    key, _, suffix = base.partition(".")
                    listed.setdefault(f"{folder}/{key}", {})[suffix] = tar.extractfile(member).read()
        assert Counter([*found.stored, *found.left_out]) == Counter([*listed])
        for key, members in listed.items():
            try:
                texts = members["txt"].decode().split("\n")
            except UnicodeDecodeError:
                texts = []
            assert (key in found.stored) == usable(members.get("png"), *texts)
            if key in found.stored:
                found.holds(key, members["png"], texts, members["cls"].decode())
        assert sum(found.not_used.values()) == counted

    check(examples, holds, keys=KEYS)


NAMES = st.sampled_from(["a", "b", ".hidden", "c.d", "Thumbs.db", "_", "ä"])
FILES = st.sampled_from([
    ("x.png", PNG), ("y.jpg", JPEG), ("y.JPEG", JPEG), ("bad.png", b"no picture"), ("short.png", PNG[:60]),
    ("x.txt", b"words"), ("y.txt", b"one\n\ntwo\r\n"), ("bad.txt", b"words"), ("blank.txt", b" \n"), ("blank.png", PNG),
    ("z", PNG), ("notes", b"words"), ("._x.png", PNG), ("a.tar.gz", b""), ("x.svg", b"?"),
])  # fmt: skip
TREES = st.lists(st.tuples(st.lists(NAMES, max_size=2), FILES), max_size=14)


def hidden(part):
    return part.startswith(".") or part == "Thumbs.db"


def first_hidden_folder(file):
    folders = file.split("/")[:-1]
    return next((tuple(folders[: place + 1]) for place, part in enumerate(folders) if hidden(part)), None)


@EXAMPLES
@pytest.mark.parametrize("caption", [None, "txt"])
def test_of_a_messy_folder_every_file_is_stored_left_out_or_counted(caption, examples, tmp_path_factory):
    def holds(tree):
        root, files = tmp_path_factory.mktemp("folder") / "in", {}
        for folders, (name, data) in [*tree, ([], ("sound.png", PNG)), ([], ("sound.txt", b"words"))]:
            path = root.joinpath(*folders)
            path.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
        for at, _, names in os.walk(root):
            files |= {str((Path(at) / name).relative_to(root)): (Path(at) / name).read_bytes() for name in names}
        found = Converted(FolderSource(root, caption=caption), root.parent / "out")
        within = {file: first_hidden_folder(file) for file in files}
        assert found.not_used.pop("hidden folders", 0) == len({*within.values()} - {None})
        seen = {file: data for file, data in files.items() if not within[file]}
        beside = set()
        for file, data in seen.items():
            stem = os.path.splitext(file)[0]
            texts, group = [], file.split("/")[0] if "/" in file else None
            if caption and file in (*found.stored, *found.left_out) and f"{stem}.txt" in seen:
                texts = seen[f"{stem}.txt"].decode().split("\n")
                beside.add(f"{stem}.txt")
            is_picture = not hidden(file.rpartition("/")[2]) and data in SOUND
            assert (file in found.stored) == (is_picture and (not caption or usable(data, *texts)))
            if file in found.stored:
                found.holds(file, data, texts, group)
        counted = sum(found.not_used.values())
        assert len(seen) == len(found.stored) + len(found.left_out) + len(beside) + counted

    check(examples, holds, tree=TREES)
