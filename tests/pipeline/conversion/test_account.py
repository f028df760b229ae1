"""The account of a conversion: what no sample uses, as the summary and the dataset say it."""

import io
import json
import tarfile

from thermopile.pipeline.opening import Dataset

from support.cli import cli, succeed
from support.pictures import as_bytes, draw

PICTURE = as_bytes(draw(3), "PNG")


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
