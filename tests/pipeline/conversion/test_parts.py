"""A conversion in parts, by processes that know nothing of each other: its dataset is that of one machine.

One suite holds in a folder and in an object store.
"""

import json
import os
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from obstore.store import MemoryStore

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.conversion.marker import read_bad_samples
from thermopile.pipeline.conversion.partial import Partial, claimed
from thermopile.pipeline.errors import DatasetError, DatasetExistsError, SourceError
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.storage import bucket
from thermopile.storage.bucket import SCRATCH, Address
from thermopile.storage.local import LocalPath
from thermopile.storage.sealed_json import seal_line, unseal

from support.conversions import convert_part, digests, finish, in_this_process, many_shards
from support.programs import program

SHARDS = 8
MANY = 60
"""Shards of the test with kills, about four samples each."""


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    many_shards(monkeypatch, rows=30)


@pytest.fixture(scope="module")
def of_one_machine(with_bad_ones, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        many_shards(patch, rows=30)
        out = tmp_path_factory.mktemp("whole") / "out"
        convert(FolderSource(with_bad_ones), out, ConvertSettings(), workers=1)
    return digests(out)


def part(pictures, out, number, count, settings=None, source=FolderSource, **options):
    return convert_part(source(pictures), out, settings or ConvertSettings(), number, count,
                        pool=in_this_process, **options)  # fmt: skip


def put_together(pictures, out, settings=None, **options):
    return finish(FolderSource(pictures), out, settings or ConvertSettings(), **options)


def shard_file(out, number, suffix):
    """A file of a part that is done."""
    parts, dataset = (".partial/", "") if out.is_remote else ("parts/", "dataset/")
    name = f"{parts}part-{number:05}" if "." in suffix else f"{dataset}shards/shard-{number:05}"
    return Partial(out).begun / f"{name}.{suffix}"


def remove(file):
    file.parent.remove([file.name])


def zero(file):
    file.rewrite(bytes(len(file.read_bytes())))


def shorten(file):
    file.rewrite(file.read_bytes()[:-1])


def lose_its_sizes(file):
    tree = unseal(file.read_bytes())
    file.rewrite(seal_line(tree | {"shards": [shard | {"sizes": {}, "etags": {}} for shard in tree["shards"]]}))


def replace_by_link(file):
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


class OvertakenSource(FolderSource):
    """Lets something else happen before its first sample is read."""

    def overtaken_by(self, event):
        self.event = event
        return self

    def sample(self, index, unchanged_since):
        event, self.event = self.event, lambda: None
        event()
        return super().sample(index, unchanged_since)


class PartsTests:
    """`out` is a place where nothing is."""

    @pytest.fixture
    def parts_done(self, with_bad_ones, out):
        """An output both of whose parts are done, and which is not finished."""
        for number in (1, 2):
            part(with_bad_ones, out, number, 2)
        return out

    def assert_done_again(self, pictures, out, number, whole):
        with pytest.raises(DatasetError, match=rf"1 of 8 shards .* not done: {number}\."):
            put_together(pictures, out)
        assert part(pictures, out, number % 2 + 1, 2).seen == 30
        put_together(pictures, out)
        assert digests(out) == whole

    @pytest.mark.parametrize("order", [pytest.param((3, 1, 2), marks=pytest.mark.wide), (1, 1, 3, 2, 2)])
    def test_parts_in_any_order_and_repeated_make_the_dataset_of_one_machine(
        self, with_bad_ones, of_one_machine, out, order
    ):
        for number in order:
            part(with_bad_ones, out, number, 3)
        summary = put_together(with_bad_ones, out)
        assert digests(out) == of_one_machine
        assert (summary.index.n, summary.left_out, len(summary.index.shard_digests)) == (220, 20, SHARDS)

    def test_a_part_reports_its_share_and_how_much_of_all_is_done(self, with_bad_ones, out):
        first, again, second = (part(with_bad_ones, out, number, 2) for number in (1, 1, 2))
        assert (first.seen, again.seen, second.seen) == (first.samples, 0, second.samples)
        assert first.samples + second.samples == 240
        assert [done.shards_done for done in (first, again, second)] == [4, 4, SHARDS]

    def test_each_sample_left_out_is_listed_once(self, with_bad_ones, parts_done):
        Partial(parts_done).errors.rewrite(b"{}\n")
        put_together(with_bad_ones, parts_done)
        keys = [sample.key for sample in read_bad_samples(parts_done / "errors.jsonl")]
        assert sorted(keys) == sorted({*keys})
        assert len(keys) == 20

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            (ConvertSettings(seed=1), "seed was 0 and is now 1"),
            (ConvertSettings(image={"quality": 80}), "image.quality"),
        ],
    )
    def test_a_part_with_other_settings_is_refused_naming_what_differs(self, with_bad_ones, out, settings, words):
        part(with_bad_ones, out, 1, 2)
        with pytest.raises(DatasetExistsError, match=words) as refused:
            part(with_bad_ones, out, 2, 2, settings)
        assert str(refused.value).endswith(f", or remove {Partial(out).begun} to start over")
        Partial(out).begun.clear()
        assert part(with_bad_ones, out, 2, 2, settings).shards_done == 4

    def test_a_part_or_a_finish_with_another_listing_is_refused(self, with_bad_ones, parts_done, tmp_path):
        other = shutil.copytree(with_bad_ones, tmp_path / "other" / "in")
        (other / "cats" / "001.png").rename(other / "cats" / "1.png")
        for convert_it in (lambda: part(other, parts_done, 1, 2), lambda: put_together(other, parts_done)):
            with pytest.raises(DatasetExistsError, match=r"source\.listing was"):
                convert_it()
        assert not (parts_done / "dataset.json").exists()

    def test_missing_shards_are_named_and_nothing_is_published(self, with_bad_ones, out):
        part(with_bad_ones, out, 1, 2)
        with pytest.raises(
            DatasetError, match=r"^4 of 8 shards of .*out are not done: 1, 3, 5, 7\. Run their parts again"
        ):
            put_together(with_bad_ones, out)
        assert not (out / "dataset.json").exists()
        part(with_bad_ones, out, 2, 2)
        assert put_together(with_bad_ones, out).index.n == 220

    def test_finishing_what_was_not_begun_is_an_error_that_says_how_to_begin(self, with_bad_ones, out):
        with pytest.raises(
            DatasetError, match=r"no part of .*out has been converted; run the same command with --part"
        ):
            put_together(with_bad_ones, out)
        assert [*out.parent.content()] == []

    @pytest.mark.parametrize(
        ("suffix", "harm"),
        [
            ("beton", zero),
            ("beton", shorten),
            ("errors.jsonl", remove),
            ("done.json", lose_its_sizes),
            pytest.param("beton", remove, marks=pytest.mark.wide),
        ],
    )
    def test_a_shard_that_is_not_as_it_was_written_is_written_again_by_its_part(
        self, with_bad_ones, parts_done, of_one_machine, suffix, harm
    ):
        harm(shard_file(parts_done, 2, suffix))
        self.assert_done_again(with_bad_ones, parts_done, 2, of_one_machine)

    def test_a_shard_of_another_plan_that_an_old_task_left_is_not_done(self, with_bad_ones, parts_done, of_one_machine):
        old = parts_done.parent / "old" / "out"
        part(with_bad_ones, old, 1, 1, ConvertSettings(seed=1))
        for suffix in ("beton", "rows", "parquet", "errors.jsonl", "done.json"):
            shard_file(parts_done, 3, suffix).rewrite(shard_file(old, 3, suffix).read_bytes())
        self.assert_done_again(with_bad_ones, parts_done, 3, of_one_machine)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_a_part_that_goes_on_after_a_new_start_ends_and_leaves_that_alone(
        self, with_bad_ones, out, of_one_machine, seed
    ):
        def start_over():
            Partial(out).begun.clear()
            part(with_bad_ones, out, 1, 2)

        with pytest.raises((DatasetExistsError, OSError)):
            part(with_bad_ones, out, 1, 1, ConvertSettings(seed=seed),
                 lambda pictures: OvertakenSource(pictures).overtaken_by(start_over))  # fmt: skip
        part(with_bad_ones, out, 2, 2)
        put_together(with_bad_ones, out)
        assert digests(out) == of_one_machine

    def test_shards_that_another_version_wrote_are_not_done(self, with_bad_ones, parts_done, monkeypatch):
        monkeypatch.setattr("thermopile.pipeline.conversion.marker.__version__", "9.0.0")
        with pytest.raises(DatasetError, match=r"8 of 8 shards .* not done"):
            put_together(with_bad_ones, parts_done)

    def test_what_all_parts_left_out_together_may_be_too_much(self, with_bad_ones, out):
        strict = ConvertSettings(max_error_rate=0.075)  # 18 samples, of which no part leaves out more than 14
        part(with_bad_ones, out, 1, 2, strict)
        with pytest.raises(SourceError, match=r"at least (19|20) of 240 samples cannot be used"):
            part(with_bad_ones, out, 2, 2, strict)
        part(with_bad_ones, out, 2, 2)
        with pytest.raises(SourceError, match="at least 20 of 240 samples cannot be used"):
            put_together(with_bad_ones, out, strict)
        assert put_together(with_bad_ones, out).left_out == 20

    def test_after_the_end_parts_and_finish_change_nothing(self, with_bad_ones, parts_done):
        put_together(with_bad_ones, parts_done)
        before = digests(parts_done)
        assert part(with_bad_ones, parts_done, 2, 2).shards_done == SHARDS
        assert put_together(with_bad_ones, parts_done).index.n == 220
        assert digests(parts_done) == before
        assert {*parts_done.parent.content()} == {"out"}

    def test_the_tokenizer_that_was_there_first_is_what_all_use(self, out):
        with claimed(out) as partial:
            (partial.dataset / "shards").make()
            partial.keep_tokenizer(b"first")
            partial.keep_tokenizer(b"second")
            assert partial.tokenizer.read_bytes() == (partial.dataset / "tokenizer.json").read_bytes() == b"first"

    def test_a_shard_without_samples_renumbers_no_other(self, with_bad_ones, out, tmp_path):
        (folder := tmp_path / "in").mkdir()
        for i in range(60):
            (folder / f"{i:02d}.png").touch()
        shutil.copy(with_bad_ones / "cats" / "001.png", folder / "19.png")
        settings = ConvertSettings(max_error_rate=1)
        part(folder, out, 1, 1, settings)
        index = put_together(folder, out, settings).index
        assert (index.n, index.first_id, index.shards) == (1, (0, 1), ("00001",))
        assert {"shards/shard-00001.beton"} == {name for name in digests(out) if name.endswith("beton")}


@pytest.mark.wide
class TestInAStore(PartsTests):
    @pytest.fixture
    def out(self, monkeypatch, tmp_path):
        store = MemoryStore()
        monkeypatch.setattr(bucket, "_store", lambda bucket, repeats=0: store)
        monkeypatch.setenv(SCRATCH, str(tmp_path))
        return Address("bucket", "parts/out")


class TestInAFolder(PartsTests):
    @pytest.fixture
    def out(self, tmp_path):
        (tmp_path / "parts").mkdir()
        return LocalPath(tmp_path / "parts" / "out")

    @pytest.mark.parametrize(
        "suffix", [*(pytest.param(each, marks=pytest.mark.wide) for each in ("beton", "done.json")), "errors.jsonl"]
    )
    def test_a_file_of_a_shard_that_is_a_link_is_written_again(self, with_bad_ones, parts_done, of_one_machine, suffix):
        replace_by_link(shard_file(parts_done, 2, suffix))
        self.assert_done_again(with_bad_ones, parts_done, 2, of_one_machine)

    def test_while_one_finishes_a_second_and_a_part_are_refused(self, with_bad_ones, parts_done):
        for convert_it in (put_together, lambda with_bad_ones, out: part(with_bad_ones, out, 1, 2)):
            with claimed(parts_done), pytest.raises(DatasetExistsError, match=f"being written by pid {os.getpid()} on"):
                convert_it(with_bad_ones, parts_done)
        with (
            claimed(parts_done, shared=True),
            pytest.raises(DatasetExistsError, match="being written by another process"),
        ):
            put_together(with_bad_ones, parts_done)

    def test_a_part_begun_again_after_the_end_does_not_meet_others_at_the_lock(self, with_bad_ones, parts_done):
        put_together(with_bad_ones, parts_done)
        with claimed(parts_done):  # as another one does for a moment, to remove what it made
            assert part(with_bad_ones, parts_done, 1, 2).shards_done == SHARDS

    def test_an_output_that_others_made_is_replaced_at_the_finish_and_only_if_asked(
        self, with_bad_ones, tmp_path, images_dataset
    ):
        out = shutil.copytree(images_dataset.path, tmp_path / "out")
        with pytest.raises(DatasetExistsError, match="exists and was not converted with these settings"):
            part(with_bad_ones, out, 1, 1)
        part(with_bad_ones, out, 1, 1, overwrite=True)
        assert json.loads((out / "dataset.json").read_text())["n"] == 300
        with pytest.raises(DatasetExistsError, match="--overwrite"):
            put_together(with_bad_ones, out)
        assert put_together(with_bad_ones, out, overwrite=True).index.n == 220


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "files"), [("folder", "with_bad_ones"), ("webdataset", "tars_with_bad_ones")])
def test_four_processes_killed_twenty_times_make_the_dataset_of_one_machine(kind, files, request, tmp_path):
    run = program("convert_in_small_shards", kind, request.getfixturevalue(files))
    rng, kills, running = np.random.default_rng(0), 0, {}
    parts, waiting = tmp_path / "parts" / "out", [1, 2, 3, 4]

    def done():
        return len(list(parts.with_name(".out.partial").glob("parts/*.done.json")))

    for number in waiting:
        (tmp_path / f"machine-{number}").mkdir()
    while waiting or running:
        for number in waiting:
            command = [*run, str(parts), "--part", f"{number}/4", "--workers", "1"]
            process = subprocess.Popen(command, cwd=tmp_path / f"machine-{number}", stderr=subprocess.DEVNULL)
            running[number] = process, done() + rng.integers(1, 6)
        waiting = []
        for number, (process, shards) in [*running.items()]:
            if kills < 20 and done() >= min(shards, MANY):
                time.sleep(rng.uniform(0, 0.05))
                process.kill()
            if process.poll() is not None:
                process.wait()
                kills += process.returncode == -signal.SIGKILL
                assert process.returncode in (0, -signal.SIGKILL)
                if kills < 20 or process.returncode != 0:
                    waiting.append(number)  # perhaps it has nothing left to do, and is killed while it finds that out
                del running[number]
        time.sleep(0.002)
    for command in ([parts, "--finish"], [tmp_path / "whole" / "out"]):
        subprocess.run([*run, *command], check=True)
    assert kills >= 20
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")
    keys = [sample.key for sample in read_bad_samples(parts / "errors.jsonl")]
    assert len(keys) == len({*keys}) == 20
