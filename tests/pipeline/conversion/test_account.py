"""The account of a conversion: what was listed is stored, left out, or counted as not used."""

import io
import json
import os
import tarfile

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

from support.cli import assert_one_line, cli, succeed
from support.conversions import dataset_of
from support.pictures import as_bytes, draw

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
    root.mkdir(exist_ok=True)
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
    with tarfile.open(root / "0.tar", "w") as tar:
        for name in members:
            data = PICTURE if name.endswith("png") else name.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    dataset = dataset_of(WebDatasetSource([LocalPath(root / "0.tar")]), root / "out", max_error_rate=1.0)
    counted = sum(each["number"] for each in dataset.index.source.get("not_used", {}).values())
    rows, bad = dataset.rows(range(dataset.n)), [*read_bad_samples(dataset.place / "errors.jsonl")]
    assert all(row["caption"] == f"{row['key']}.txt" for row in rows)
    of_key = {}
    for name in members:
        key, _, suffix = name.partition(".")
        of_key.setdefault(key, []).append(suffix)
    assert {row["key"] for row in rows} | {sample.key for sample in bad} == {*of_key}
    beside = [suffix for suffixes in of_key.values() if len(suffixes) > 1 for suffix in suffixes]
    assert counted == len([suffix for suffix in beside if suffix not in ("png", "txt", "npy")])


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
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for name, data in ((f"{number}.png", PICTURE), (f"{number}.json", b"{}")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    convert = ("convert", "webdataset", tmp_path, tmp_path / "out")
    for part in ("1/2", "2/2"):
        succeed(*convert, "--part", part)
    done = succeed(*convert, "--finish")
    assert "not used: 3 × members that end in .json, such as" in done.stdout
    assert Dataset(tmp_path / "out").n == 3


def test_as_json_the_summary_of_every_dataset_is_one_document_on_stdout(tmp_path):
    written(tmp_path / "in", [([], ("x.txt", b"words")), ([], ("bad.png", b"no picture")), ([], ("x.png", PICTURE))])
    Image.new("RGB", (16, 16), (3, 3, 3)).save(tmp_path / "in" / "dark.png")
    Image.new("RGB", (16, 16), "white").save(tmp_path / "in" / "paper.png")
    (tmp_path / "linked").mkdir()
    (tmp_path / "in" / "cats").symlink_to(tmp_path / "linked")
    convert = ("convert", "folder", tmp_path / "in", tmp_path / "out", "--max-error-rate", 0.5)
    done = succeed(*convert, "--holdout", 1, "--json")
    train, test = json.loads(done.stdout)["datasets"]
    assert [each["dataset"] for each in (train, test)] == [f"{tmp_path / 'out'}", f"{tmp_path / 'out'}-test"]
    assert train["samples"] + train["left_out"] == 4
    for name in ("left_out", "nearly_black", "nearly_white"):
        assert train[name] + test[name] == 1
    assert train["reasons"] | test["reasons"] == {"not a JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM, AVIF picture, or its start is damaged": 1}  # fmt: skip # noqa: E501
    assert train["not_used"] == {"files that end in .txt": {"number": 1, "example": "x.txt", "cure": "--caption txt"}}
    assert train["notes"] == [f"the folder cats is a link to {tmp_path / 'linked'}"]
    assert train["bytes"] == Dataset(tmp_path / "out").place.size_below()
    assert "  nearly black pictures: 1\n" in done.stderr
    assert "  nearly white pictures: 1\n" in done.stderr


def test_as_json_a_part_tells_the_shards_that_are_done(tmp_path):
    written(tmp_path / "in", [])
    convert = ("convert", "folder", tmp_path / "in", tmp_path / "out", "--json")
    (part,) = json.loads(succeed(*convert, "--part", "1/2").stdout)["datasets"]
    assert (part["part"], part["samples"], part["shards"], part["shards_done"]) == ("1/2", 1, 1, 1)
    (whole,) = json.loads(succeed(*convert, "--finish").stdout)["datasets"]
    assert whole["samples"] == 1


def test_a_corrected_command_runs_where_nothing_of_the_old_one_is_kept(tmp_path):
    written(tmp_path / "in", [([], ("bad.png", b"no picture")), ([], ("x.png", PICTURE))])
    convert = ("convert", "folder", tmp_path / "in", tmp_path / "out")
    refused = cli(*convert, "--on-error", "fail")
    assert_one_line(refused, 1, "leave such samples out with --on-error skip")
    assert "--resume" not in refused.stderr
    succeed(*convert, "--max-error-rate", 0.5, "--max-size", 64)


@pytest.mark.parametrize("quoted", ["{00..03}.tar", "*.tar", "train-[0-9].tar"])
def test_what_a_shell_would_have_expanded_is_answered(tmp_path, quoted):
    assert_one_line(cli("convert", "webdataset", tmp_path / quoted, tmp_path / "out"), 2, "leave out its quotes")
