"""Runs on a dataset in place: those on what conversion makes of the same tars, bit for bit."""

import os
import shutil

import pytest

from thermopile.benchmarks.object_server import uploaded
from thermopile.pipeline.opening import Dataset
from thermopile.storage.bucket import Address
from thermopile.trainer.config import load_config
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, sets, succeed
from support.in_place import in_place, versions_of
from support.runs import SMALL_MODEL, assert_same_run, finish, train

pytestmark = pytest.mark.wide

WINDOWS = {"canonical_shards": 2, "blocks_per_shard": 8, "window_blocks": 3}


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch):
    monkeypatch.setenv("THERMOPILE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def placed(of_tars, tmp_path_factory):
    """The dataset in place, of tars on disk."""
    return in_place(*reversed(of_tars), tmp_path_factory.mktemp("placed") / "out")


@pytest.fixture(scope="module")
def in_store(s3, of_tars, tmp_path_factory):
    """Places of the dataset in place, of tars in the store: on disk, and in the store as well."""
    root = uploaded(of_tars[0][0].parent, Address("bucket", "tars"))
    out = in_place(*reversed(of_tars), tmp_path_factory.mktemp("in_store") / "out")
    versions_of(out, root, [version for _, _, version in root.listing()])
    return [str(out), str(uploaded(out, Address("bucket", "placed")))]


def settings(place, **data):
    """Eleven epochs of 18 steps, in windows of three blocks of eight."""
    data = {"path": str(place), "image_size": 16, "workers": 2} | data
    tree = {"epochs": 11, "batch_size": 32, "log_every": 1, "model": SMALL_MODEL, "data": data, "order": WINDOWS}
    return resolve(load_config(tree), Dataset(place))[0]


@pytest.fixture(scope="module")
def converted_run(of_tars, tmp_path_factory):
    return train(settings(of_tars[1].path), tmp_path_factory.mktemp("runs") / "converted")


def test_a_run_on_tars_on_disk_is_that_on_the_conversion(placed, converted_run, tmp_path):
    assert_same_run(train(settings(placed), tmp_path / "run"), converted_run)


@pytest.mark.parametrize("number", [0, 1], ids=["dataset on disk", "dataset in a store"])
def test_a_run_on_tars_in_a_store_is_that_on_the_conversion(in_store, converted_run, tmp_path, number):
    run = train(settings(in_store[number], cache=5_500_000), tmp_path / "run")
    assert_same_run(run, converted_run)


def test_two_ranks_train_as_on_the_conversion(start_ranks, of_tars, in_store, tmp_path):
    runs, words = [], sets("batch_size=64", "epochs=2", "data.image_size=16", "model.dim=16", "log_every=1",
                           *(f"order.{name}={value}" for name, value in WINDOWS.items()))  # fmt: skip
    variables = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "THERMOPILE_"))}
    code = f"os.environ |= {variables}; from thermopile.tools.cli import main; main()"
    for name, place in ("converted", of_tars[1].path), ("in_place", in_store[0]):
        finish(start_ranks(2, "train", "--data", place, "--out", tmp_path / name, *words, codes=[code] * 2))
        runs.append(RunDirectory(tmp_path / name))
    assert_same_run(*runs)


def test_a_run_begun_on_one_form_is_refused_on_the_other(of_tars, placed, tmp_path):
    words = ("--out", tmp_path / "run", *sets("batch_size=100", "epochs=2", "data.image_size=16", "model.dim=16"))
    succeed("train", "--data", placed, *words, "--steps", 3)
    done = cli("train", "--data", of_tars[1].path, *words, "--resume", "--steps", 4, "--allow-change", "steps")
    assert_one_line(done, 2, f"{of_tars[1].path} is not the dataset of {tmp_path / 'run'}", "--data")


def test_the_command_line_says_where_the_pictures_are_and_takes_another_root(of_tars, placed, tmp_path):
    words = ("--data", placed, "--out", tmp_path / "run", *sets("data.image_size=16", "batch_size=100", "model.dim=16"))
    done = cli("train", *words, "--steps", 2, "--tars", tmp_path / "nowhere")
    assert_one_line(done, 1, tmp_path / "nowhere" / "00000.tar", "is missing", "--tars ROOT")
    done = succeed("train", *words, "--steps", 2, "--tars", of_tars[0][0].parent)
    assert f"from {placed}, pictures in {of_tars[0][0].parent}, " in done.stderr
    assert RunDirectory(tmp_path / "run").config().data.tars == str(of_tars[0][0].parent)
    succeed(
        "train", "--out", tmp_path / "run", "--resume", "--tars", shutil.copytree(of_tars[0][0].parent, tmp_path / "to")
    )
    assert RunDirectory(tmp_path / "run").config().data.tars == str(tmp_path / "to")
    assert "no pictures" not in succeed("inspect", tmp_path / "run").output
    sheet = tmp_path / "sheet.html"
    succeed("show", placed, "--out", sheet, "--tars", of_tars[0][0].parent, "--image-size", 32)
    assert sheet.exists()
    succeed("convert", "check", placed, "--tars", of_tars[0][0].parent)
