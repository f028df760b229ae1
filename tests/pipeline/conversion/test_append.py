"""Samples appended to a dataset: those that it had keep their ids, files and bytes, whatever step a kill comes at."""

import json
import os
import shutil
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from thermopile.pipeline.conversion import append
from thermopile.pipeline.conversion.check import check_dataset
from thermopile.pipeline.dataset.tokenizer import encode, load_tokenizer
from thermopile.pipeline.errors import DatasetExistsError
from thermopile.pipeline.opening import Dataset

from support.cli import cli
from support.conversions import digests
from support.kills import killed_at
from support.pictures import draw

run = partial(cli, "convert")


@pytest.fixture(scope="module")
def two_lists(tmp_path_factory):
    """A list of 60 pictures with captions and one of 12, every sixth of them unusable."""
    root = tmp_path_factory.mktemp("lists")
    for name, low, high in (("first", 0, 60), ("second", 60, 72)):
        rows = ["filepath,title"]
        for i in range(low, high):
            draw(i).save(root / f"{i}.png") if i % 6 else (root / f"{i}.png").write_bytes(b"no picture")
            rows.append(f"{i}.png,picture number {i} of the {name} list")
        (root / f"{name}.csv").write_text("\n".join(rows) + "\n")
    return root


@pytest.fixture(scope="module")
def converted(two_lists):
    assert run("csv", two_lists / "first.csv", two_lists / "out", "--max-error-rate", 1).exit_code == 0
    return two_lists / "out"


@pytest.fixture
def out(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "out")


def append_second(two_lists, out, *options):
    return run("csv", two_lists / "second.csv", out, "--append", "--max-error-rate", 1, *options)


def samples_of(dataset, ids):
    return [(dataset.jpeg(id), dataset.rows([id])[0]["caption"]) for id in ids]


def test_new_samples_get_the_next_ids_and_the_others_stay_bit_for_bit(two_lists, out):
    old, before = Dataset(out), digests(out)
    result = append_second(two_lists, out)
    assert result.exit_code == 0, result.stderr
    assert f"{out}: 60 samples with those appended" in result.stdout
    assert f"{out}: 10 samples to append in 1 shard" in result.stdout
    assert f"2 left out, see {out / 'errors.jsonl'}: " in result.stdout
    assert "out: 12 samples to append, " in result.stderr
    assert ".out.appended" not in result.output
    grown, after = Dataset(out), digests(out)
    assert (old.n, grown.n) == (50, 60)
    assert {name for name in before if before[name] != after[name]} == {"dataset.json", "errors.jsonl"}
    assert samples_of(grown, range(50)) == samples_of(old, range(50))
    assert {row["caption"].split()[-2] for row in grown.rows(range(50, 60))} == {"second"}
    assert grown.index.grown_from == old.index.fingerprint != grown.index.fingerprint
    assert list(check_dataset(out)) == []
    assert os.listdir(out.parent) == ["out"]


def test_samples_left_out_are_listed_after_those_of_the_first_conversion(two_lists, out):
    before = (out / "errors.jsonl").read_text()
    append_second(two_lists, out)
    after = (out / "errors.jsonl").read_text()
    assert after.startswith(before)
    assert {json.loads(line)["uri"] for line in after.removeprefix(before).splitlines()} == {"60.png", "66.png"}


def test_captions_are_encoded_by_the_datasets_own_tokenizer(two_lists, out):
    append_second(two_lists, out)
    grown = Dataset(out)
    shards, rows = grown.locate(np.array([0, 55]))
    tokens = [grown.shard(int(shard)).tokens(np.array([row]))[0] for shard, row in zip(shards, rows, strict=True)]
    texts = [row["caption"] for row in grown.rows([0, 55])]
    tokenizer = load_tokenizer(grown.tokenizer_path, context_length=32)
    np.testing.assert_array_equal(tokens, encode(tokenizer, texts).tokens)


def test_appending_the_same_samples_again_is_refused_and_others_may_follow(two_lists, out):
    append_second(two_lists, out)
    before = digests(out)
    for words in (["second.csv"], ["second.csv", "--seed", 1], ["first.csv"]):
        again = run("csv", two_lists / words[0], out, "--append", "--max-error-rate", 1, *words[1:])
        assert again.exit_code == 2
        assert again.stderr.splitlines()[-1].startswith(f"Error: {out} holds these samples already")
    assert digests(out) == before
    third = two_lists / "third.csv"
    third.write_text("filepath,title\n7.png,picture number 7 once more\n")
    assert run("csv", third, out, "--append").exit_code == 0
    assert Dataset(out).n == 61


def test_the_samples_may_be_converted_in_parts(two_lists, converted, out, tmp_path):
    for option in (["--part", "1/2"], ["--part", "2/2"], ["--finish"]):
        assert append_second(two_lists, out, *option).exit_code == 0
    whole = shutil.copytree(converted, tmp_path / "whole" / "out")
    append_second(two_lists, whole)
    assert digests(out) == digests(whole)


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.wide)])
def test_an_append_killed_at_any_step_of_its_end_ends_the_same(two_lists, converted, tmp_path, monkeypatch, every):
    whole = shutil.copytree(converted, tmp_path / "whole" / "out")
    append_second(two_lists, whole)
    ready = shutil.copytree(converted, tmp_path / "ready" / "out")
    with monkeypatch.context() as patch:
        patch.setattr(append, "join", lambda out: None)
        patch.setattr("thermopile.tools.convert.join", lambda out: None)
        append_second(two_lists, ready)
    kills = 0
    while True:
        work = shutil.copytree(tmp_path / "ready", tmp_path / f"work-{kills}")
        killed = killed_at(1 + kills * every, work, lambda work=work: append.join(work / "out"))
        assert Dataset(work / "out").n in (50, 60)
        append.join(work / "out")
        assert digests(work) == digests(tmp_path / "whole"), kills
        shutil.rmtree(work)
        if not killed:
            break
        kills += 1
    assert kills > 20 / every


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--max-size", 64], "leave out --max-size"), (["--holdout", 2], "--append and --holdout exclude each other")],
)
def test_what_the_dataset_decides_cannot_be_chosen(two_lists, out, options, words):
    refused = append_second(two_lists, out, *options)
    assert (refused.exit_code, words in refused.stderr) == (2, True)


def test_what_is_no_dataset_or_of_another_mode_is_not_appended_to(two_lists, out, tmp_path, images_dataset):
    assert "none does not exist" in append_second(two_lists, tmp_path / "none").stderr
    pictures = shutil.copytree(images_dataset.path, tmp_path / "pictures")
    refused = append_second(two_lists, pictures)
    assert (refused.exit_code, "holds images, but the source pairs" in refused.stderr) == (2, True)


def converted_but_not_joined(two_lists, out, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("thermopile.tools.convert.join", lambda out: None)
        assert append_second(two_lists, out).exit_code in (0, 1)
    assert (append.appended_path(out) / "dataset.json").exists()


def interrupted(*arguments):
    raise KeyboardInterrupt


@pytest.mark.wide
def test_a_dataset_that_replaced_the_one_an_append_was_begun_for_stays_as_it_is(two_lists, out, monkeypatch):
    converted_but_not_joined(two_lists, out, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(append, "_move_shards", interrupted)
        with pytest.raises(KeyboardInterrupt):
            append.join(out)
    other = two_lists / "other.csv"
    other.write_text("filepath,title\n" + "".join(f"{i}.png,another caption {i}\n" for i in range(1, 6)))
    assert run("csv", other, out, "--overwrite").exit_code == 0
    before = digests(out)
    refused = append_second(two_lists, out)
    assert (refused.exit_code, refused.stderr) == (
        1,
        f"Error: {out} was replaced since the append began; remove {append.appended_path(out)} and append again\n",
    )
    assert digests(out) == before
    shutil.rmtree(append.appended_path(out))
    assert append_second(two_lists, out).exit_code == 0
    assert Dataset(out).n == 15


def test_of_a_source_that_was_converted_in_part_some_samples_are_said_to_be_there(two_lists, tmp_path):
    words = "csv", two_lists / "first.csv", tmp_path / "part", "--max-error-rate", 1
    assert run(*words, "--limit", 20).exit_code == 0
    said = run(*words, "--append").stderr
    assert "holds these samples already, or a selection of them; append any others from a source of their own" in said


def test_samples_converted_twice_at_the_same_time_are_joined_once(two_lists, out, monkeypatch):
    """The other process looked before the first had joined them, and converted them after."""
    converted_but_not_joined(two_lists, out, monkeypatch)
    addition = append.appended_path(out)
    once_more = shutil.copytree(addition, out.parent / "once more")
    append.join(out)
    append.join(out)  # of a process that converted nothing, since the first had done it
    once_more.rename(addition)
    before = digests(out)
    with pytest.raises(DatasetExistsError, match="holds these samples already"):
        append.join(out)
    assert digests(out) == before
    assert os.listdir(out.parent) == ["out"]


def test_nothing_is_converted_for_a_dataset_that_cannot_grow(two_lists, out, tmp_path):
    with (out / "tokenizer.json").open("a") as tokenizer:
        tokenizer.write(" ")
    before = sorted(os.listdir(tmp_path))
    refused = append_second(two_lists, out)
    assert refused.exit_code == 1
    assert "tokenizer.json was changed after conversion" in refused.stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_a_kill_before_the_last_step_of_an_append_does_not_hinder_the_next(two_lists, out):
    append.appended_path(out).mkdir()
    assert append_second(two_lists, out).exit_code == 0


def test_a_dataset_behind_a_link_grows_where_it_is(two_lists, converted, tmp_path):
    """As from a home directory to a larger disk: files cannot be renamed from one file system to another."""
    with TemporaryDirectory(dir="/dev/shm") as other_disk:
        shutil.copytree(converted, f"{other_disk}/out")
        (tmp_path / "out").symlink_to(f"{other_disk}/out")
        assert append_second(two_lists, tmp_path / "out").exit_code == 0
        assert Dataset(tmp_path / "out").n == 60
        assert os.listdir(other_disk) == os.listdir(tmp_path) == ["out"]
