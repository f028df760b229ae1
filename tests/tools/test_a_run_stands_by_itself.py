"""What each command does with a run after samples were appended to its dataset, and without its dataset."""

import shlex
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from thermopile.benchmarks.object_server import uploaded
from thermopile.pipeline.opening import Dataset, Mixture, open_dataset
from thermopile.state_store.reader import StateReader
from thermopile.storage.bucket import Address
from thermopile.trainer.run_directory import RunDirectory

from support.cli import answer, assert_one_line, cli, sets, succeed
from support.conversions import append_glyphs
from support.mixtures import made_parts
from support.runs import OFTEN, SMALL_MODEL, assert_same_run, new_run, small, stopped, train

pytestmark = pytest.mark.wide

NEW = np.arange(0, 10_847, 500)
"""Glyphs to append, 22."""
MOVED = "pass its new path with --data."
OR_TRAIN = "pass its new path with --data, or name another dataset with --train."

COMMANDS = {
    "status": ("status {run}", None),
    "inspect": ("inspect {run} --json --features 64 {data}", None),
    "inspect --at": ("inspect {run} --json --at step-2 --features none {data}", None),
    "inspect --sample": ("inspect {run} --sample 3 --json {data}", None),
    "inspect --export": ("inspect {run} --export {out} {data}", None),
    "inspect --neighbours": ("inspect {run} --sample 3 --neighbours 2 --json {data}", "pass its path with --data"),
    "curate": ("curate {run} --keep {out} --drop-misfits 5 {data}", MOVED),
    "eval": ("eval {run} --test {other} --json {data}", OR_TRAIN),
    "eval --train": ("eval {run} --train {other} --test {other} --json {data}", None),
    "effect": ("effect {run} {run} --test {other} --json {data}", OR_TRAIN),
    "embed": ("embed {run} {other} {out}", None),
    "export": ("export {run} --to {out} --format safetensors", None),
    "state check": ("state check {run} {data}", None),
    "state log": ("state log {run}", None),
    "fork": ("fork {run} --out {out} {data}", MOVED),
    "fork step-0": ("fork {run}@step-0 --out {out} {data}", MOVED),
    "train --resume": ("train --out {run} --resume {data}", MOVED),
    "train --init-from": ("train --data {other} --out {out} --init-from {run} {like} --dry-run", None),
}
"""Command -> its words, and the end of the one line it says without the run's dataset; None: it works without."""
each_command = pytest.mark.parametrize(("words", "line"), COMMANDS.values(), ids=COMMANDS)


@pytest.fixture(scope="module")
def away(pairs_dataset, tmp_path_factory):
    """A place from which a run's dataset is moved; and it grown, and moved."""
    folder = tmp_path_factory.mktemp("data")
    moved, grown = (shutil.copytree(pairs_dataset.path, folder / name) for name in ("moved", "grown"))
    append_glyphs(grown, NEW)
    return folder / "recorded", grown, moved


def begun(path, dataset, **more):
    """A run of 6 steps that was stopped after 4."""
    return stopped(small(dataset, steps=6, **OFTEN, **more), path, 5)


@pytest.fixture(scope="module")
def stopped_run(away, tmp_path_factory):
    away[2].rename(away[0])
    run = begun(tmp_path_factory.mktemp("runs") / "run", Dataset(away[0]))
    away[0].rename(away[2])
    return run


@pytest.fixture
def run(stopped_run, tmp_path):
    """A copy to change."""
    return RunDirectory(shutil.copytree(stopped_run.path, tmp_path / "run"))


@pytest.fixture
def grown(away):
    """The run's dataset has grown where it is recorded."""
    recorded, grown, _ = away
    grown.rename(recorded)
    yield recorded
    recorded.rename(grown)


@pytest.fixture(scope="session")
def other(captions_dataset):
    """Another dataset to score and embed, with a tokenizer of its own."""
    return captions_dataset.path


@pytest.fixture
def carry_out(run, other, tmp_path):
    def carry_out(words, data=""):
        like = "--set init.sides=image --set model.dim=16 --set model.image.config.width=4 --set batch_size=64"
        places = {"run": run.path, "out": tmp_path / "out.parquet", "other": other, "data": data, "like": like}
        return cli(*words.format(**places).split())

    return carry_out


@each_command
def test_every_command_works_after_samples_were_appended(words, line, carry_out, grown):
    done = carry_out(words)
    assert done.exit_code == 0, done.output
    assert "is not the dataset" not in done.output


@each_command
def test_without_its_dataset_a_command_works_or_says_in_one_line_what_is_needed(words, line, carry_out):
    done = carry_out(words)
    if line is None:
        assert done.exit_code == 0, done.output
    else:
        assert_one_line(done, 1, line)


@pytest.mark.parametrize("words", [words for words, line in COMMANDS.values() if line], ids=str)
def test_what_needs_the_dataset_works_once_told_where_it_is(words, carry_out, away):
    done = carry_out(words, f"--data {away[2]}")
    assert done.exit_code == 0, done.output


def test_a_place_that_is_typed_and_holds_no_dataset_is_an_error_of_a_check_too(carry_out, tmp_path):
    done = carry_out("state check {run} --data {data}", tmp_path)
    assert (done.exit_code, f"{tmp_path} is not a dataset" in done.stderr) == (1, True), done.output


@pytest.mark.parametrize(
    "words", ["train --out {run} --resume", "state check {run}", "inspect {run} --json --features none"]
)
def test_after_samples_were_appended_the_line_names_the_command_that_uses_them(words, carry_out, run, grown):
    said = carry_out(words).output
    assert f"{grown} has grown since {run.path} began; the 22 new samples are left out. To use them, go on with" in said


def test_that_command_trains_on_all_samples(run, grown, tmp_path):
    _, words = cli("state", "check", run.path).stdout.split("go on with: thermopile train ")
    words, _, _ = words.partition("\n")
    succeed("train", *shlex.split(words.replace("--out NEW", f"--out {tmp_path / 'new'}")))
    assert StateReader.open(tmp_path / "new" / "state").samples == 2022


@pytest.fixture(scope="module")
def whole(pairs_dataset, tmp_path_factory):
    """The same run, never stopped, on the dataset that never grew."""
    return train(small(pairs_dataset, steps=6, **OFTEN), tmp_path_factory.mktemp("runs") / "whole")


def test_a_run_resumed_after_samples_were_appended_repeats_its_losses_bit_for_bit(run, grown, whole):
    succeed("train", "--out", run.path, "--resume")
    assert_same_run(run, whole)


def test_so_does_a_fork(run, grown, whole, tmp_path):
    succeed("fork", run.path, "--out", tmp_path / "fork")
    for file in (run.tokenizer, run.trained_on):
        assert (tmp_path / "fork" / file.name).read_bytes() == file.read_bytes()
    succeed("train", "--out", tmp_path / "fork", "--resume")
    assert_same_run(RunDirectory(tmp_path / "fork"), whole)


def test_captions_are_those_of_the_samples_trained_on(run, grown, pairs_dataset):
    (sample,) = answer("inspect", run.path, "--sample", "1999")["samples"]
    assert sample["caption"] == pairs_dataset.rows([1999])[0]["caption"]
    assert_one_line(cli("inspect", run.path, "--sample", "2000"), 2, "ids 0 … 1999")


def test_scores_are_by_the_samples_trained_on(run, grown, other):
    assert answer("eval", run.path, "--test", other)["train"]["samples"] == 2000


def test_an_export_without_the_dataset_has_the_tokenizer_of_the_run(run, pairs_dataset, tmp_path):
    succeed("export", run.path, "--to", tmp_path / "out", "--format", "safetensors")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == pairs_dataset.tokenizer_path.read_bytes()


@pytest.mark.parametrize("name", ["tokenizer.json", "trained_on.json"])
def test_a_damaged_or_missing_file_is_told_and_a_resumed_run_writes_it_again(name, run, away, tmp_path):
    file = run.path / name
    kept = file.read_bytes()
    export = ("export", run.path, "--to", tmp_path / "out", "--format", "safetensors")
    for damaged in (kept.replace(b"2", b"3", 1), None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        done = cli(*export)
        assert done.exit_code == 1
        assert f"{file} is missing or damaged; `thermopile train --resume --out {run.path}`" in done.stderr
    succeed("train", "--out", run.path, "--resume", "--data", away[2])
    assert file.read_bytes() == kept
    succeed(*export)


def test_a_file_that_leads_elsewhere_is_refused(run, tmp_path):
    run.tokenizer.unlink()
    run.tokenizer.symlink_to("/dev/zero")
    words = ("export", run.path, "--to", tmp_path / "out", "--format", "safetensors")
    assert_one_line(cli(*words), 1, run.tokenizer, "not a regular file")


def test_another_dataset_in_its_place_is_still_refused(run, away, captions_dataset):
    recorded = away[0]
    recorded.symlink_to(captions_dataset.path)
    try:
        assert cli("state", "check", run.path).exit_code == 1
        assert_one_line(cli("train", "--out", run.path, "--resume"), 2, f"is not the dataset of {run.path}")
    finally:
        recorded.unlink()


def test_a_run_on_pictures_goes_on_after_samples_were_appended(pairs_dataset, tmp_path):
    data = shutil.copytree(pairs_dataset.path, tmp_path / "data")
    run = begun(tmp_path / "run", Dataset(data), objective={"mode": "unimodal"}, model={"image": SMALL_MODEL["image"]})
    append_glyphs(data, NEW)
    succeed("train", "--out", run.path, "--resume")
    data.rename(tmp_path / "moved")
    succeed("export", run.path, "--to", tmp_path / "out", "--format", "safetensors")
    succeed("embed", run.path, tmp_path / "moved", tmp_path / "out.parquet")
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == 2022


def test_a_mixture_goes_on_after_samples_were_appended_to_a_part(pairs_dataset, tmp_path):
    parts = made_parts(pairs_dataset, tmp_path / "parts", 900, 400)
    paths = [str(part.path) for part in parts]
    settings = sets("steps=6", "batch_size=64", "data.image_size=16", "checkpoint.every_steps=2", "epochs=2")
    words = [word for path in paths for word in ("--data", path)]
    succeed("train", "--out", tmp_path / "run", *words, "--share", 1, "--share", 1, *settings)
    append_glyphs(parts[0].path, NEW)
    assert Mixture([Dataset(path) for path in paths]).n == 1322
    more = ("--set", "steps=8", "--allow-change", "steps")
    done = succeed("train", "--out", tmp_path / "run", "--resume", *more)
    assert "the 22 new samples are left out" in done.stderr
    succeed("eval", tmp_path / "run", "--test", parts[1].path, *words)
    assert "--grow" not in done.stderr
    succeed("inspect", tmp_path / "run", "--json")


def test_a_run_in_a_bucket_goes_on_and_its_command_works_there(s3, away, tmp_path):
    recorded = Address("bucket", "data/glyphs")
    run = new_run()
    uploaded(away[2], recorded)
    settings = sets("steps=6", "batch_size=256", "data.image_size=16", "checkpoint.every_steps=2", "model.dim=16")
    succeed("train", "--out", run.path, "--data", recorded, *settings)
    uploaded(away[1], recorded)
    assert open_dataset(recorded).n == 2022
    done = succeed("train", "--out", run.path, "--resume", "--set", "steps=8", "--allow-change", "steps")
    words = done.stderr.split("go on with: thermopile train ")[1].splitlines()[0]
    succeed("train", *shlex.split(words.replace("--out NEW", f"--out {tmp_path / 'new'}")), "--dry-run")
    recorded.remove(["dataset.json"])
    succeed("export", run.path, "--to", tmp_path / "out", "--format", "safetensors")
    assert_one_line(cli("eval", run.path, "--test", away[2]), 1, OR_TRAIN)
