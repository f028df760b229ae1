"""A dataset that is converted to an object store: the objects are the files of a local one."""

import subprocess
import sys

import pytest

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.conversion.marker import line_of, read_bad_samples
from thermopile.pipeline.errors import DatasetExistsError
from thermopile.pipeline.sources import BadSample
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.storage import bucket, files
from thermopile.storage.bucket import Address

from support.conversions import convert_part, many_shards

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
        return {name: (place / name).read_bytes() for name, _, _ in place.listing()}
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def to_bucket(with_bad_ones, out, **options):
    return convert(FolderSource(with_bad_ones), out, ConvertSettings(), workers=1, **options)


def part(with_bad_ones, out, number, count, settings=None, **options):
    return convert_part(
        FolderSource(with_bad_ones), out, settings or ConvertSettings(), number, count, workers=1, **options
    )


def test_an_interrupted_conversion_goes_on_where_it_was(with_bad_ones, out, local):
    def interrupt(counts):
        if len([*(out / "shards").listing()]) >= 3:
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


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "errors.jsonl", "shards/shard-00000.rows", "shards/shard-notes.txt"]
)
def test_objects_that_no_plan_accounts_for_are_not_removed_unasked(with_bad_ones, out, name):
    (out / name).write(b"precious")
    for convert_it in (
        lambda: to_bucket(with_bad_ones, out),
        lambda: to_bucket(with_bad_ones, out, resume=True),
        lambda: part(with_bad_ones, out, 1, 8),
        lambda: part(with_bad_ones, out, 1, 8, overwrite=True),
    ):
        with pytest.raises(DatasetExistsError, match=f"holds other objects, such as '{name}'"):
            convert_it()
        assert contents(out) == {name: b"precious"}


def test_objects_named_as_those_of_a_dataset_are_replaced_if_asked(with_bad_ones, out, local):
    for name in ("tokenizer.json", "errors.jsonl", "shards/shard-00000.rows", "shards/shard-00100.rows"):
        (out / name).write(b"of before")
    to_bucket(with_bad_ones, out, overwrite=True)
    assert contents(out) == local


def test_the_etag_of_an_object_written_in_parts_is_that_of_the_listing(out, tmp_path):
    (tmp_path / "large").write_bytes(bytes(30 << 20))
    etag = (out / "large").write(tmp_path / "large")
    assert "-" in etag  # as of several parts
    assert list(out.listing()) == [("large", 30 << 20, etag)]


def test_a_list_of_samples_left_out_may_be_long(out):
    line = line_of(BadSample("u" * 100_000, "k", "r"))
    (out / "errors.jsonl").write((line * 700).encode())
    assert (out / "errors.jsonl").size() > files.MAX_TEXT_BYTES
    assert sum(1 for _ in read_bad_samples(out / "errors.jsonl")) == 700


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
            impatient.setattr(bucket, "PATIENCE_SECONDS", 0.5)
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
