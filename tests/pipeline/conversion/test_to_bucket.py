"""A dataset that is converted to an object store: the objects are the files of a local one."""

import subprocess
import sys

import pytest

from thermopile import objects
from thermopile.objects import Address
from thermopile.pipeline.conversion.convert import ConvertSettings, PartNumber, convert, convert_part, finish
from thermopile.pipeline.errors import DatasetError, DatasetExistsError
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.glyphs import GlyphSource

from conversions import many_shards

pytestmark = pytest.mark.wide
SHARDS = 8


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    many_shards(monkeypatch, rows=30)


@pytest.fixture
def out(s3, request):
    return Address("bucket", request.node.name) / "out"


@pytest.fixture
def local(with_bad_ones, tmp_path):
    """Content of the files of a local conversion, by their names."""
    convert(FolderSource(with_bad_ones), tmp_path / "local", ConvertSettings(), workers=1)
    return contents(tmp_path / "local")


def contents(place):
    if isinstance(place, Address):
        return {name: (place / name).read() for name, _ in place.objects()}
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def to_bucket(with_bad_ones, out, **options):
    return convert(FolderSource(with_bad_ones), out, ConvertSettings(), workers=1, **options)


def part(with_bad_ones, out, number, count, settings=None):
    return convert_part(
        FolderSource(with_bad_ones), out, settings or ConvertSettings(), PartNumber(number, count), workers=1
    )


def test_the_objects_are_the_files_of_a_local_dataset_byte_for_byte(with_bad_ones, out, local):
    summary = to_bucket(with_bad_ones, out)
    assert (summary.samples, summary.left_out, summary.shards) == (220, 20, SHARDS)
    assert contents(out) == local


def test_captions_are_encoded_by_the_same_tokenizer_as_locally(tmp_path, out):
    convert(GlyphSource(0, test=True), out, ConvertSettings(), workers=1)
    convert(GlyphSource(0, test=True), tmp_path / "local", ConvertSettings(), workers=1)
    assert contents(out) == contents(tmp_path / "local")


def test_parts_make_the_same_dataset_and_are_done_once(with_bad_ones, out, local):
    assert [part(with_bad_ones, out, number, 3).shards_done for number in (2, 1)] == [3, 6]
    with pytest.raises(DatasetError, match=r"2 of 8 shards of s3://.*/out are not done: 2, 5\."):
        finish(FolderSource(with_bad_ones), out, ConvertSettings())
    assert part(with_bad_ones, out, 1, 3).seen == 0
    part(with_bad_ones, out, 3, 3)
    for _ in range(2):
        assert finish(FolderSource(with_bad_ones), out, ConvertSettings()).samples == 220
    assert part(with_bad_ones, out, 1, 3).seen == 0
    assert contents(out) == local


def test_an_interrupted_conversion_goes_on_where_it_was(with_bad_ones, out, local):
    def interrupt(counts):
        if len([*(out / "shards").objects()]) >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_bucket(with_bad_ones, out, on_progress=interrupt)
    with pytest.raises(DatasetExistsError, match="unfinished conversion; continue it with --resume"):
        to_bucket(with_bad_ones, out)
    assert to_bucket(with_bad_ones, out, resume=True).seen < 240
    assert contents(out) == local


def test_starting_over_removes_what_was_begun_with_other_settings(with_bad_ones, out, local):
    part(with_bad_ones, out, 1, 2, ConvertSettings(seed=1))
    with pytest.raises(DatasetExistsError, match="seed was 1 and is now 0"):
        part(with_bad_ones, out, 2, 2)
    to_bucket(with_bad_ones, out, overwrite=True)
    assert contents(out) == local


def test_a_dataset_or_foreign_objects_are_never_replaced(with_bad_ones, out, local):
    to_bucket(with_bad_ones, out)
    with pytest.raises(DatasetExistsError, match="choose another address, or delete it"):
        to_bucket(with_bad_ones, out, overwrite=True)
    assert contents(out) == local
    (out.parent / "other" / "thesis.txt").write(b"precious")
    with pytest.raises(DatasetExistsError, match=r"holds other objects, such as 'thesis\.txt'"):
        to_bucket(with_bad_ones, out.parent / "other", overwrite=True)
    assert contents(out.parent / "other") == {"thesis.txt": b"precious"}


def test_a_shard_without_samples_is_refused_since_objects_cannot_be_renumbered(tmp_path, out, draw):
    for i in range(60):
        draw(i).save(tmp_path / f"{i:02d}.png") if i < 2 else (tmp_path / f"{i:02d}.png").write_bytes(b"")
    with pytest.raises(DatasetError, match="has no usable sample, and objects cannot be renumbered"):
        convert(FolderSource(tmp_path), out, ConvertSettings(max_error_rate=1), workers=1)
    assert not (out / "dataset.json").exists()


def test_a_server_that_fails_now_and_then_changes_nothing(with_bad_ones, out, local, s3):
    with s3.gateway(failing=0.05) as gateway:
        to_bucket(with_bad_ones, out)
        assert gateway.stats()["requests"] > 50
    assert contents(out) == local


def test_a_server_that_stays_away_is_one_error_and_the_conversion_goes_on_later(
    with_bad_ones, out, local, s3, monkeypatch
):
    part(with_bad_ones, out, 1, 2)
    with s3.gateway() as gateway:
        gateway.stop()
        with monkeypatch.context() as impatient:
            impatient.setattr(objects, "PATIENCE_SECONDS", 0.5)
            with pytest.raises(OSError, match=r"^[^\n]*AWS_ENDPOINT_URL[^\n]*$"):
                to_bucket(with_bad_ones, out, resume=True)
    assert to_bucket(with_bad_ones, out, resume=True).seen < 240
    assert contents(out) == local


def test_the_command_line_converts_a_training_and_a_test_set_in_parts(s3, out, tmp_path):
    def run(*words):
        command = [sys.executable, "-m", "thermopile.tools.cli", "convert", "glyphs", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True)

    for words in (["--part", "1/2"], ["--part", "2/2"], ["--finish"]):
        done = run(out, *words)
        assert done.returncode == 0, done.stderr
    assert f"{out} is complete: 10,847 samples of 100 classes in " in done.stdout
    assert "; put together from its parts\n" in done.stdout
    assert run(tmp_path / "out").returncode == 0
    for name in ("out", "out-test"):
        assert contents(out.with_name(name)) == contents(tmp_path / name)
    again = run(out)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "choose another address" in again.stderr
