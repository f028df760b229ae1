"""A conversion in parts, by processes that know nothing of each other: its dataset is that of one machine."""

import json
import os
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.conversion.marker import read_bad_samples
from thermopile.pipeline.conversion.partial import claimed
from thermopile.pipeline.errors import DatasetError, DatasetExistsError, SourceError
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.storage.sealed_json import seal_line, unseal

from support.conversions import convert_part, digests, finish, many_shards
from support.programs import program

SHARDS = 8
MANY = 60
"""Shards of the test with kills, about four samples each."""


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    many_shards(monkeypatch, rows=30)


def part(with_bad_ones, out, number, count, settings=None, **options):
    return convert_part(FolderSource(with_bad_ones), out, settings or ConvertSettings(), number, count,
                        workers=1, **options)  # fmt: skip


def put_together(with_bad_ones, out, settings=None, **options):
    return finish(FolderSource(with_bad_ones), out, settings or ConvertSettings(), **options)


def shard_file(out, part, suffix):
    """A file of a part that is done."""
    name = f"parts/part-{part:05}" if "." in suffix else f"dataset/shards/shard-{part:05}"
    return out.with_name(f".{out.name}.partial") / f"{name}.{suffix}"


@pytest.fixture(scope="module")
def both_parts(with_bad_ones, tmp_path_factory):
    """The folder of an output both of whose parts are done."""
    folder = tmp_path_factory.mktemp("both")
    with pytest.MonkeyPatch.context() as patch:
        many_shards(patch, rows=30)
        for number in (1, 2):
            part(with_bad_ones, folder / "out", number, 2)
    return folder


@pytest.fixture
def parts_done(both_parts, tmp_path):
    """An output both of whose parts are done, and which is not finished."""
    shutil.copytree(both_parts, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out"


@pytest.fixture(scope="module")
def of_one_machine(with_bad_ones, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        many_shards(patch, rows=30)
        out = tmp_path_factory.mktemp("whole") / "out"
        convert(FolderSource(with_bad_ones), out, ConvertSettings(), workers=1)
    return digests(out)


@pytest.mark.parametrize(
    "order", [*(pytest.param(each, marks=pytest.mark.wide) for each in ((1, 2, 3), (3, 1, 2))), (1, 1, 3, 2, 2)]
)
def test_parts_in_any_order_and_repeated_make_the_dataset_of_one_machine(
    with_bad_ones, of_one_machine, tmp_path, order
):
    for number in order:
        part(with_bad_ones, tmp_path / "out", number, 3)
    summary = put_together(with_bad_ones, tmp_path / "out")
    assert digests(tmp_path / "out") == of_one_machine
    assert (summary.index.n, summary.left_out, len(summary.index.shard_digests)) == (220, 20, SHARDS)
    assert os.listdir(tmp_path) == ["out"]


def test_a_part_reports_its_share_and_how_much_of_all_is_done(with_bad_ones, tmp_path):
    first, again, second = (part(with_bad_ones, tmp_path / "out", number, 2) for number in (1, 1, 2))
    assert (first.seen, again.seen, second.seen) == (first.samples, 0, second.samples)
    assert first.samples + second.samples == 240
    assert [done.shards_done for done in (first, again, second)] == [4, 4, SHARDS]


def test_each_sample_left_out_is_listed_once(with_bad_ones, parts_done):
    (parts_done.with_name(".out.partial") / "parts" / "part-00001.errors.jsonl.other-7.writing").write_text("{}\n")
    put_together(with_bad_ones, parts_done)
    keys = [sample.key for sample in read_bad_samples(parts_done / "errors.jsonl")]
    assert sorted(keys) == sorted({*keys})
    assert len(keys) == 20


@pytest.mark.parametrize(
    ("settings", "words"),
    [(ConvertSettings(seed=1), "seed was 0 and is now 1"), (ConvertSettings(image={"quality": 80}), "image.quality")],
)
def test_a_part_with_other_settings_is_refused_naming_what_differs(with_bad_ones, tmp_path, settings, words):
    part(with_bad_ones, tmp_path / "out", 1, 2)
    with pytest.raises(DatasetExistsError, match=words) as refused:
        part(with_bad_ones, tmp_path / "out", 2, 2, settings)
    assert str(refused.value).endswith(f", or remove {tmp_path / '.out.partial'} to start over")
    shutil.rmtree(tmp_path / ".out.partial")
    assert part(with_bad_ones, tmp_path / "out", 2, 2, settings).shards_done == 4


def test_a_part_or_a_finish_with_another_listing_is_refused(with_bad_ones, parts_done, tmp_path):
    other = shutil.copytree(with_bad_ones, tmp_path / "other" / "in")
    (other / "cats" / "001.png").rename(other / "cats" / "1.png")
    for convert_it in (lambda: part(other, parts_done, 1, 2), lambda: put_together(other, parts_done)):
        with pytest.raises(DatasetExistsError, match=r"source\.listing was"):
            convert_it()
    assert not parts_done.exists()


def test_missing_shards_are_named_and_nothing_is_published(with_bad_ones, tmp_path):
    part(with_bad_ones, tmp_path / "out", 1, 2)
    with pytest.raises(DatasetError, match=r"^4 of 8 shards of .*out are not done: 1, 3, 5, 7\. Run their parts again"):
        put_together(with_bad_ones, tmp_path / "out")
    assert os.listdir(tmp_path) == [".out.partial"]
    part(with_bad_ones, tmp_path / "out", 2, 2)
    assert put_together(with_bad_ones, tmp_path / "out").index.n == 220


def test_finishing_what_was_not_begun_is_an_error_that_says_how_to_begin(with_bad_ones, tmp_path):
    with pytest.raises(DatasetError, match=r"no part of .*out has been converted; run the same command with --part"):
        put_together(with_bad_ones, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_shard_whose_file_was_cut_short_is_not_done(with_bad_ones, parts_done):
    with shard_file(parts_done, 2, "beton").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DatasetError, match=r"1 of 8 shards .* not done: 2\."):
        put_together(with_bad_ones, parts_done)
    assert part(with_bad_ones, parts_done, 1, 2).seen == 30


def remove(file):
    file.unlink()


def replace_by_link(file):
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def zero(file):
    file.write_bytes(bytes(file.stat().st_size))


def lose_its_sizes(file):
    tree = unseal(file.read_bytes())
    file.write_bytes(seal_line(tree | {"sizes": {}}))


@pytest.mark.parametrize(
    ("suffix", "harm"),
    [
        ("beton", zero),
        ("errors.jsonl", replace_by_link),
        ("done.json", lose_its_sizes),
        *(pytest.param("beton", harm, marks=pytest.mark.wide) for harm in (remove, replace_by_link)),
        pytest.param("errors.jsonl", remove, marks=pytest.mark.wide),
        pytest.param("done.json", replace_by_link, marks=pytest.mark.wide),
    ],
)
def test_a_shard_that_is_not_as_it_was_written_is_written_again_by_its_part(
    with_bad_ones, parts_done, of_one_machine, suffix, harm
):
    harm(shard_file(parts_done, 2, suffix))
    with pytest.raises(DatasetError, match=r"1 of 8 shards .* not done: 2\."):
        put_together(with_bad_ones, parts_done)
    assert part(with_bad_ones, parts_done, 1, 2).seen == 30
    put_together(with_bad_ones, parts_done)
    assert digests(parts_done) == of_one_machine


def test_a_shard_of_another_plan_that_an_old_task_left_is_not_done(with_bad_ones, parts_done, tmp_path, of_one_machine):
    part(with_bad_ones, tmp_path / "old" / "out", 1, 1, ConvertSettings(seed=1))
    for suffix in ("beton", "rows", "parquet", "errors.jsonl", "done.json"):
        shutil.copy(shard_file(tmp_path / "old" / "out", 3, suffix), shard_file(parts_done, 3, suffix))
    with pytest.raises(DatasetError, match=r"1 of 8 shards .* not done: 3\."):
        put_together(with_bad_ones, parts_done)
    part(with_bad_ones, parts_done, 2, 2)
    put_together(with_bad_ones, parts_done)
    assert digests(parts_done) == of_one_machine


def test_shards_that_another_version_wrote_are_not_done(with_bad_ones, parts_done, monkeypatch):
    monkeypatch.setattr("thermopile.pipeline.conversion.marker.__version__", "9.0.0")
    with pytest.raises(DatasetError, match=r"8 of 8 shards .* not done"):
        put_together(with_bad_ones, parts_done)


def test_what_all_parts_left_out_together_may_be_too_much(with_bad_ones, tmp_path):
    strict = ConvertSettings(max_error_rate=0.075)  # 18 samples, of which no part leaves out more than 14
    part(with_bad_ones, tmp_path / "out", 1, 2, strict)
    with pytest.raises(SourceError, match=r"at least (19|20) of 240 samples cannot be used"):
        part(with_bad_ones, tmp_path / "out", 2, 2, strict)
    part(with_bad_ones, tmp_path / "out", 2, 2)
    with pytest.raises(SourceError, match="at least 20 of 240 samples cannot be used"):
        put_together(with_bad_ones, tmp_path / "out", strict)
    assert put_together(with_bad_ones, tmp_path / "out").left_out == 20


def test_while_one_finishes_a_second_and_a_part_are_refused(with_bad_ones, parts_done):
    for convert_it in (put_together, lambda with_bad_ones, out: part(with_bad_ones, out, 1, 2)):
        with claimed(parts_done), pytest.raises(DatasetExistsError, match=f"being written by pid {os.getpid()} on"):
            convert_it(with_bad_ones, parts_done)
    with claimed(parts_done, shared=True), pytest.raises(DatasetExistsError, match="being written by another process"):
        put_together(with_bad_ones, parts_done)


def test_a_part_begun_again_after_the_end_does_not_meet_others_at_the_lock(with_bad_ones, parts_done):
    put_together(with_bad_ones, parts_done)
    with claimed(parts_done):  # as another one does for a moment, to remove what it made
        assert part(with_bad_ones, parts_done, 1, 2).shards_done == SHARDS


def test_after_the_end_parts_and_finish_change_nothing(with_bad_ones, parts_done, tmp_path):
    put_together(with_bad_ones, parts_done)
    before = digests(tmp_path)
    assert part(with_bad_ones, parts_done, 2, 2).shards_done == SHARDS
    assert put_together(with_bad_ones, parts_done).index.n == 220
    assert digests(tmp_path) == before
    assert os.listdir(tmp_path) == ["out"]


def test_an_output_that_others_made_is_replaced_at_the_finish_and_only_if_asked(
    with_bad_ones, tmp_path, images_dataset
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
