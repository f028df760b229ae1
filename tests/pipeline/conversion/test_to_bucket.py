"""A dataset that is converted to an object store: the objects are the files of a local one."""

import subprocess
import sys

import pytest

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.conversion.marker import line_of, read_bad_samples
from thermopile.pipeline.conversion.partial import claimed
from thermopile.pipeline.errors import DatasetError, DatasetExistsError
from thermopile.pipeline.sources import BadSample
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.storage import bucket, files
from thermopile.storage.bucket import Address
from thermopile.storage.sealed_json import seal_line, unseal

from support.conversions import convert_part, finish, in_this_process, many_shards
from support.pictures import draw

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
        return {name: (place / name).read_bytes() for name, _ in place.objects()}
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def to_bucket(with_bad_ones, out, **options):
    return convert(FolderSource(with_bad_ones), out, ConvertSettings(), workers=1, **options)


def part(with_bad_ones, out, number, count, settings=None, **options):
    return convert_part(
        FolderSource(with_bad_ones), out, settings or ConvertSettings(), number, count, workers=1, **options
    )


def test_parts_make_the_same_dataset_and_are_done_once(with_bad_ones, out, local):
    assert [part(with_bad_ones, out, number, 3).shards_done for number in (2, 1)] == [3, 6]
    with pytest.raises(DatasetError, match=r"2 of 8 shards of s3://.*/out are not done: 2, 5\."):
        finish(FolderSource(with_bad_ones), out, ConvertSettings())
    assert part(with_bad_ones, out, 1, 3).seen == 0
    part(with_bad_ones, out, 3, 3)
    for _ in range(2):
        assert finish(FolderSource(with_bad_ones), out, ConvertSettings()).index.n == 220
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


class OvertakenSource(FolderSource):
    """Lets something else happen before its first sample is read."""

    def overtaken_by(self, event):
        self.event = event
        return self

    def sample(self, index, unchanged_since):
        event, self.event = self.event, lambda: None
        event()
        return super().sample(index, unchanged_since)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_part_that_goes_on_after_a_new_start_ends_and_leaves_that_alone(with_bad_ones, out, local, seed):
    def start_over():
        with claimed(out) as partial:
            partial.clear()
        part(with_bad_ones, out, 1, 2)

    source = OvertakenSource(with_bad_ones).overtaken_by(start_over)
    with pytest.raises(DatasetExistsError, match=r"another process has finished the conversion to .*, or started it"):
        convert_part(source, out, ConvertSettings(seed=seed), 1, 1, pool=in_this_process)
    part(with_bad_ones, out, 2, 2)
    finish(FolderSource(with_bad_ones), out, ConvertSettings())
    assert contents(out) == local


def test_a_part_that_goes_on_after_the_end_changes_nothing(with_bad_ones, out, local):
    source = OvertakenSource(with_bad_ones).overtaken_by(lambda: to_bucket(with_bad_ones, out, resume=True))
    with pytest.raises(DatasetExistsError, match="another process has finished"):
        convert_part(source, out, ConvertSettings(), 1, 1, pool=in_this_process)
    assert contents(out) == local


@pytest.mark.parametrize("name", ["shards/shard-00002.rows", ".partial/part-00002.errors.jsonl"])
def test_a_shard_whose_object_is_not_the_one_it_was_published_with_is_not_done(with_bad_ones, out, local, name):
    part(with_bad_ones, out, 1, 1)
    (out / name).write(bytes((out / name).size()))
    with pytest.raises(DatasetError, match=r"1 of 8 shards of .* not done: 2\."):
        finish(FolderSource(with_bad_ones), out, ConvertSettings())
    assert part(with_bad_ones, out, 1, 1).seen == 30
    finish(FolderSource(with_bad_ones), out, ConvertSettings())
    assert contents(out) == local


def test_a_marker_that_names_no_objects_does_not_count(with_bad_ones, out):
    part(with_bad_ones, out, 1, 1)
    marker = out / ".partial" / "part-00002.done.json"
    marker.write(seal_line(unseal(marker.read_bytes()) | {"sizes": {}, "etags": {}}))
    with pytest.raises(DatasetError, match=r"1 of 8 shards of .* not done: 2\."):
        finish(FolderSource(with_bad_ones), out, ConvertSettings())


def test_the_etag_of_an_object_written_in_parts_is_that_of_the_listing(out, tmp_path):
    (tmp_path / "large").write_bytes(bytes(30 << 20))
    etag = (out / "large").write(tmp_path / "large")
    assert "-" in etag  # as of several parts
    assert list(out.listing()) == [("large", 30 << 20, etag)]


def test_the_tokenizer_that_was_there_first_is_what_all_use(out, tmp_path):
    with claimed(out) as partial:
        partial.keep_tokenizer(b"first")
        partial.keep_tokenizer(b"second")
        assert partial.tokenizer.read_bytes() == (out / "tokenizer.json").read_bytes() == b"first"


def test_a_list_of_samples_left_out_may_be_long(out):
    line = line_of(BadSample("u" * 100_000, "k", "r"))
    (out / "errors.jsonl").write((line * 700).encode())
    assert (out / "errors.jsonl").size() > files.MAX_TEXT_BYTES
    assert sum(1 for _ in read_bad_samples(out / "errors.jsonl")) == 700


def test_a_shard_without_samples_renumbers_no_other(tmp_path, out):
    for i in range(60):
        path = tmp_path / "in" / f"{i:02d}.png"
        path.parent.mkdir(exist_ok=True)
        draw(i).save(path) if i == 19 else path.write_bytes(b"")
    for place in (out, tmp_path / "local"):
        index = convert(FolderSource(path.parent), place, ConvertSettings(max_error_rate=1), workers=1).index
        assert (index.n, index.first_id, index.shards) == (1, (0, 1), ("00001",))
    assert contents(out) == contents(tmp_path / "local")
    assert {"shards/shard-00001.beton"} == {name for name in contents(out) if name.endswith("beton")}


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
