"""A directory of an interrupted conversion that somebody else prepared: nothing outside is written, nothing hangs."""

import json
import os
import shutil
import tempfile
from contextlib import suppress

import numpy as np
import pytest

from thermopile.pipeline.conversion.bucket_partial import in_bucket
from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.conversion.partial import Partial
from thermopile.pipeline.conversion.plan import Plan
from thermopile.pipeline.errors import DatasetError, DatasetExistsError
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.storage.bucket import Address
from thermopile.storage.files import NotRegularFileError

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


def test_a_tokenizer_that_is_a_link_is_not_taken(copy):
    tokenizer = copy / ".out.partial" / "dataset" / "tokenizer.json"
    tokenizer.rename(copy.with_name("outside") / "tokenizer.json")
    tokenizer.symlink_to(copy.with_name("outside") / "tokenizer.json")
    with pytest.raises(DatasetError, match=r"tokenizer\.json is a link"):
        go_on(copy / "out", resume=True)
    assert not (copy / "out").exists()


def test_lists_of_samples_left_out_are_not_read_through_a_link(copy):
    parts = copy / ".out.partial" / "parts"
    (parts / "part-00000.done.json").unlink()
    (parts / "part-00000.errors.jsonl").unlink()
    (parts / "part-00000.errors.jsonl").symlink_to(copy.with_name("outside") / "precious")
    partial = Partial(copy / "out")
    with pytest.raises(DatasetError, match=r"errors\.jsonl is a link"):
        partial.bad_samples(Plan.of(GlyphSource(0), ConvertSettings(), SELECTION, None))


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


def test_a_killed_conversions_shards_in_progress_are_removed_from_a_bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = Address("bucket", "out")
    if (child := os.fork()) == 0:
        with in_bucket(out) as killed:
            (killed.scratch / "part-00000.7.beton").touch()
            os._exit(9)
    os.waitpid(child, 0)
    assert len(list(tmp_path.glob("*/part-00000.7.beton"))) == 1
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").write_text("keep me")
    (tmp_path / "thermopile-shards-link").symlink_to("elsewhere")
    with in_bucket(out) as living, in_bucket(out):
        assert living.scratch.exists()
        assert list(tmp_path.glob("*/part-00000.7.beton")) == []
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "thermopile-shards-link"}
    assert (tmp_path / "elsewhere" / "lock").read_text() == "keep me"
