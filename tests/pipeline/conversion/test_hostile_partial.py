"""A directory of an interrupted conversion that somebody else prepared: nothing outside is written, nothing hangs."""

import json
import os
import shutil
from contextlib import suppress

import numpy as np
import pytest

from thermopile.files import NotRegularFileError
from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.conversion.partial import Partial
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.errors import DatasetError, DatasetExistsError
from thermopile.pipeline.sources.glyphs import GlyphSource

from made import write_first_format

SELECTION = np.arange(0, 320, 20)


def go_on(out, **options):
    return convert(GlyphSource(0), out, ConvertSettings(), workers=1, selection=SELECTION, **options)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A conversion whose one shard is done, killed before the dataset was put together."""

    def killed(*_):
        raise KeyboardInterrupt

    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partial, "assemble", killed)
        with pytest.raises(KeyboardInterrupt):
            go_on(folder / "out")
    return folder


@pytest.fixture
def copy(interrupted, tmp_path):
    shutil.copytree(interrupted, tmp_path / "copy")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("keep me")
    return tmp_path / "copy"


def what_is_outside(copy):
    outside = copy.with_name("outside")
    return {path.name: path.read_text() for path in outside.iterdir()}


@pytest.mark.parametrize(("name", "option"), [
    *((name, "resume") for name in ("", "lock", "plan.json", "parts", "dataset", "dataset/shards",
                                    "parts/part-00000.beton", "parts/part-00000.done.json", "dataset/errors.jsonl")),
    ("parts", "overwrite"),
])  # fmt: skip
def test_nothing_is_written_or_moved_through_a_link(copy, name, option):
    place, outside = copy / ".out.partial" / name, copy.with_name("outside")
    is_directory = place.is_dir()
    shutil.rmtree(place) if is_directory else place.unlink(missing_ok=True)
    place.symlink_to(outside if is_directory else outside / "precious")
    with suppress(DatasetError, NotRegularFileError):
        go_on(copy / "out", **{option: True})
    assert what_is_outside(copy) == {"precious": "keep me"}


@pytest.mark.parametrize("name", ["lock", "parts/part-00000.done.json"])
def test_a_pipe_is_one_error_and_not_waited_for(copy, name):
    place = copy / ".out.partial" / name
    place.unlink()
    os.mkfifo(place)
    with pytest.raises((DatasetExistsError, NotRegularFileError), match=place.name):
        go_on(copy / "out", resume=True)


@pytest.mark.parametrize("text", ["[" * 100_000, "changed"])
def test_a_marker_that_is_not_what_was_written_has_its_shard_written_again(copy, text):
    marker = copy / ".out.partial" / "parts" / "part-00000.done.json"
    marker.write_text(text if text != "changed" else marker.read_text().replace('"rows": 16', '"rows": 17'))
    assert go_on(copy / "out", resume=True).seen == 16
    assert json.loads((copy / "out" / "dataset.json").read_text())["n"] == 16


def test_a_whole_dataset_that_version_0_1_0_left_is_not_published(copy):
    partial = copy / ".out.partial"
    shutil.copytree(partial, copy / "kept")
    go_on(copy / "out", resume=True)
    (copy / "kept").rename(partial)
    shutil.rmtree(partial / "dataset")
    write_first_format(Dataset(copy / "out"), partial / "dataset")
    shutil.rmtree(copy / "out")
    with pytest.raises(DatasetExistsError, match=r"has format 1, .*start over with --overwrite and without --resume"):
        go_on(copy / "out", resume=True)
    assert not (copy / "out").exists()
    go_on(copy / "out", overwrite=True)
    assert Dataset(copy / "out").index.format == 2
