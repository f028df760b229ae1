"""The account of a conversion: what was listed is stored, left out, or counted as not used."""

import io
import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from thermopile.pipeline.conversion.marker import read_bad_samples
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.webdataset import WebDatasetSource
from thermopile.storage.local import LocalPath

from support.cli import cli, succeed
from support.conversions import dataset_of
from support.pictures import as_bytes, draw
from support.tars import write_members

PICTURE = as_bytes(draw(3), "PNG")
NAMES = st.sampled_from(["a", "b", ".hidden", "c.d", "Thumbs.db", "_"])
FILES = st.sampled_from([
    ("x.png", PICTURE), ("y.jpg", as_bytes(draw(1), "JPEG")), ("bad.png", b"no picture"), ("x.txt", b"words"),
    ("z", PICTURE), ("notes", b"words"), ("._x.png", PICTURE), ("a.tar.gz", b""), ("y.JPEG", as_bytes(draw(2), "JPEG")),
    ("x.heic", b"?"),
])  # fmt: skip
TREES = st.lists(st.tuples(st.lists(NAMES, max_size=2), FILES), min_size=1, max_size=12)


def written(root, tree):
    """Write the files; return the relative paths of those that are there."""
    for folders, (name, data) in tree:
        path = root.joinpath(*folders)
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    (root / "sound.png").write_bytes(PICTURE)
    return {os.path.relpath(os.path.join(at, name), root) for at, _, names in os.walk(root) for name in names}


def hidden(part):
    return part.startswith(".") or part == "Thumbs.db"


@pytest.mark.wide
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES)
def test_of_a_messy_folder_all_files_are_stored_left_out_or_counted(tmp_path_factory, tree):
    root = tmp_path_factory.mktemp("messy")
    files = written(root / "in", tree)
    dataset = dataset_of(FolderSource(root / "in"), root / "out", max_error_rate=1.0)
    stored = {row["uri"] for row in dataset.rows(range(dataset.n))}
    left_out = {sample.uri for sample in read_bad_samples(dataset.place / "errors.jsonl")}
    counted = dataset.index.source.get("not_used", {})
    folders = counted.pop("hidden folders", {"number": 0})["number"]
    within = {file for file in files if any(map(hidden, file.split("/")[:-1]))}
    assert folders == len({tuple(first_hidden(file)) for file in within})
    assert len(files) == len(stored) + len(left_out) + sum(each["number"] for each in counted.values()) + len(within)
    for uri in stored:  # as an independent reader has it
        with Image.open(root / "in" / uri) as image:
            assert np.abs(pixels(dataset, uri) - np.asarray(image.convert("RGB"), float)).mean() < 8


def first_hidden(file):
    parts = file.split("/")[:-1]
    return parts[: next(place for place, part in enumerate(parts) if hidden(part)) + 1]


def pixels(dataset, uri):
    ids = [row["sample_id"] for row in dataset.rows(range(dataset.n)) if row["uri"] == uri]
    return np.asarray(Image.open(io.BytesIO(dataset.jpeg(ids[0]))), float)


KEYS, SUFFIXES = st.sampled_from(["a", "b", "c"]), st.sampled_from(["png", "txt", "json", "1.png", "1.txt", "npy"])


@pytest.mark.wide
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.sets(st.tuples(KEYS, SUFFIXES), min_size=1))
def test_of_a_messy_tar_all_pictures_and_texts_are_stored_left_out_or_counted(tmp_path_factory, names):
    root = tmp_path_factory.mktemp("messy")
    members = [f"{key}.{suffix}" for key, suffix in sorted(names | {("sound", "png"), ("sound", "txt")})]
    write_members(root / "0.tar", *((name, PICTURE if name.endswith("png") else name.encode()) for name in members))
    dataset = dataset_of(WebDatasetSource([LocalPath(root / "0.tar")]), root / "out", max_error_rate=1.0)
    counted = sum(each["number"] for each in dataset.index.source.get("not_used", {}).values())
    rows, bad = dataset.rows(range(dataset.n)), [*read_bad_samples(dataset.place / "errors.jsonl")]
    assert all(row["caption"] == f"{row['key']}.txt" for row in rows)
    keys = {row["key"] for row in rows}
    assert keys | {sample.key for sample in bad} == {name.partition(".")[0] for name in members}
    of_stored = [name for name in members if name.partition(".")[0] in keys and not name.endswith("npy")]
    assert len(of_stored) == 2 * len(rows) + counted


def test_the_summary_and_the_dataset_say_what_is_not_used(tmp_path):
    written(tmp_path / "in", [([], ("x.txt", b"words")), ([".git"], ("config", b"")), ([], ("x.png", PICTURE))])
    done = succeed("convert", "folder", tmp_path / "in", tmp_path / "out")
    assert "  not used: 1 × files that end in .txt, such as x.txt: --caption txt\n" in done.stdout
    assert "  not used: 1 × hidden folders, such as .git\n" in done.stdout
    index = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert index["source"]["not_used"]["files that end in .txt"] == {
        "number": 1, "example": "x.txt", "cure": "--caption txt",
    }  # fmt: skip
    done = succeed(
        "convert", "folder", tmp_path / "in", tmp_path / "pairs", "--caption", "txt", "--max-error-rate", "0.5"
    )
    assert "1 left out" in done.stdout
    assert Dataset(tmp_path / "pairs").column("caption").to_pylist() == ["words"]
    refused = cli("convert", "folder", tmp_path / "in", tmp_path / "none", "--caption", "caption")
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)


def test_parts_of_tars_add_their_accounts(tmp_path):
    for number in range(3):
        write_members(tmp_path / f"{number}.tar", (f"{number}.png", PICTURE), (f"{number}.json", b"{}"))
    convert = ("convert", "webdataset", tmp_path, tmp_path / "out")
    for part in ("1/2", "2/2"):
        succeed(*convert, "--part", part)
    done = succeed(*convert, "--finish")
    assert "not used: 3 × members that end in .json, such as" in done.stdout
    assert Dataset(tmp_path / "out").n == 3
