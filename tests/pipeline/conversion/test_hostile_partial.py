"""A directory of an interrupted conversion that somebody else prepared: nothing outside is written, nothing hangs."""

import json
import os
import shutil
import tempfile
from contextlib import suppress

import numpy as np
import pytest

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.conversion.partial import Partial, claimed
from thermopile.pipeline.conversion.plan import Plan
from thermopile.pipeline.errors import DatasetError, DatasetExistsError
from thermopile.pipeline.sources import Asked
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.storage.bucket import Address
from thermopile.storage.files import NotRegularFileError
from thermopile.storage.local import LocalPath

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
    *((name, "resume") for name in ("", "lock", "plan.json", "parts", "parts/part-00000.done.json", "dataset",
                                    "dataset/shards", "dataset/shards/shard-00000.beton", "dataset/errors.jsonl")),
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
    with pytest.raises(NotRegularFileError, match=r"tokenizer\.json is a link"):
        go_on(copy / "out", resume=True)
    assert not (copy / "out").exists()


def test_lists_of_samples_left_out_are_not_read_through_a_link(copy):
    parts = copy / ".out.partial" / "parts"
    (parts / "part-00000.done.json").unlink()
    (parts / "part-00000.errors.jsonl").unlink()
    (parts / "part-00000.errors.jsonl").symlink_to(copy.with_name("outside") / "precious")
    plan = Plan.of(GlyphSource(0), ConvertSettings(), Asked(selection=SELECTION))
    with claimed(copy / "out") as partial:
        assert partial.bad_samples(plan.model_copy(update={"shards": 1})) == []


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


@pytest.mark.parametrize(("to_bucket", "name"), [(True, "thermopile-shards-link"), (False, "writing-link")])
def test_a_killed_conversions_shards_in_progress_are_removed(tmp_path, monkeypatch, to_bucket, name):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    out = Address("bucket", "out") if to_bucket else LocalPath(tmp_path / "out")
    folder = tmp_path / "temporary" if to_bucket else tmp_path / ".out.partial"
    (tmp_path / "temporary").mkdir()
    if (child := os.fork()) == 0:
        with claimed(out, shared=True) as killed:
            (killed.scratch / "part-00000.7.beton").touch()
            os._exit(9)
    os.waitpid(child, 0)
    assert len(list(folder.glob("*/part-00000.7.beton"))) == 1
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "lock").write_text("keep me")
    (folder / name).symlink_to("elsewhere")
    with claimed(out, shared=True) as living, claimed(out, shared=True):
        assert living.scratch.exists()
        assert list(folder.glob("*/part-00000.7.beton")) == []
        assert (folder / "elsewhere" / "lock").read_text() == "keep me"
        assert (folder / name).is_symlink()
