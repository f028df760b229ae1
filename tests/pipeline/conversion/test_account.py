"""The account of a conversion: what no sample uses, as the summary and the dataset say it."""

import json

import pytest
from PIL import Image

from thermopile.pipeline.opening import Dataset

from support.cli import answer, assert_one_line, cli, succeed
from support.pictures import as_bytes, draw
from support.tars import write_members

PICTURE = as_bytes(draw(3), "PNG")


def written(root, tree):
    """Write the files, and sound.png beside them."""
    for folders, (name, data) in [*tree, ([], ("sound.png", PICTURE))]:
        path = root.joinpath(*folders)
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def test_the_summary_and_the_dataset_say_what_is_not_used(tmp_path):
    (tmp_path / "in" / ".git").mkdir(parents=True)
    for name, data in (("x.txt", b"words"), (".git/config", b""), ("x.png", PICTURE), ("sound.png", PICTURE)):
        (tmp_path / "in" / name).write_bytes(data)
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


def test_samples_without_a_class_are_counted_where_others_have_one(tmp_path):
    members = [(f"{number}.png", as_bytes(draw(number), "PNG")) for number in range(5)]
    write_members(tmp_path / "some.tar", members[0], ("0.cls", b"ant"), *members[1:3], ("2.cls", b" \n"))
    write_members(tmp_path / "none.tar", *members[3:])
    convert = ("convert", "webdataset", tmp_path / "some.tar", tmp_path / "out")
    assert "  samples without a class: 2\n" in succeed(*convert, "--dry-run").stdout
    for part in ("1/2", "2/2"):
        succeed(*convert, "--part", part)
    (whole,) = answer(*convert, "--finish")["datasets"]
    (again,) = answer(*convert, "--resume")["datasets"]
    assert (whole["without_class"], again["without_class"]) == (2, None)
    assert "without a class" not in succeed("convert", "webdataset", tmp_path / "none.tar", tmp_path / "none").stdout


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
