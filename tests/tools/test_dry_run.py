"""`thermopile train --dry-run`: what training would need, and every refusal of training; nothing is written."""

import os
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.trainer.config import load_config
from thermopile.trainer.dry_run import dry_run
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, sets, succeed
from support.datasets import named_ids
from support.runs import weights
from support.wrong_settings import WRONG

train = partial(cli, "train")
TINY = ("epochs=1", "data.image_size=16", "model.dim=8", "model.image.config.width=4")


def facts(text):
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines()[1:]}


def test_a_dry_run_says_what_training_then_has_and_writes_nothing(pairs_dataset, tmp_path):
    run, words = tmp_path / "run", ["--data", pairs_dataset.path, *sets(*TINY)]
    found = facts(succeed("train", "--out", run, *words, "--dry-run").stdout)
    assert list(tmp_path.iterdir()) == []
    succeed("train", "--out", run, *words)
    image, text = (
        sum(value.numel() for name, value in weights(RunDirectory(run)).items() if name.startswith(f"{side}."))
        for side in ("image", "text")
    )
    assert found["parameters"] == f"image {image:,}, text {text:,}; {image + text:,} trained"
    assert found["steps"] == "7, 7 an epoch, 256 samples each"
    (tensors,) = run.glob("checkpoints/*/tensors.safetensors")
    size, unit = found["disk"].split()[:2]
    assert unit == "MB"
    assert float(size) == pytest.approx(tensors.stat().st_size / 1e6, rel=0.1)
    assert found["export"] == "safetensors"
    again = facts(succeed("train", "--out", run, "--resume", "--dry-run").stdout)
    assert again == {name: value for name, value in found.items() if name != "time"}  # --timed is for a new run


@pytest.mark.wide
def test_encoders_of_transformers_take_no_memory_and_can_be_exported_to_it(pairs_dataset, tmp_path):
    wide = ("model.image.config.hidden_size=4096", "model.image.config.intermediate_size=16384")  # 10 GB of weights
    towers = ("model.image.name=hf:vit-b", *wide, "model.text.name=hf:clip-text")
    words = ["--data", pairs_dataset.path, "--out", tmp_path / "run", *sets("data.image_size=224", *towers)]
    found = facts(succeed("train", *words, "--dry-run").stdout)
    assert found["export"] == "hf or safetensors"
    model = {"image": {"name": "hf:vit-s"}, "text": {"name": "hf:clip-text"}}
    config = {"device": "cpu", "data": {"image_size": 224}, "model": model}
    settings, run = resolve(load_config(config), pairs_dataset)[0], RunDirectory(tmp_path / "run")
    with dry_run(settings, run) as trainer:
        assert all(weights.is_meta for weights in trainer.run.encoders.parameters())
    assert int(found["parameters"].split()[1].rstrip(",").replace(",", "")) > 2_400_000_000


def test_the_time_is_estimated_from_a_few_steps_even_of_a_short_run(pairs_dataset, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "aside"))
    (tmp_path / "aside").mkdir()
    words = ["--data", pairs_dataset.path, "--out", tmp_path / "run", *sets(*TINY)]
    tracked = sets('trackers=["builtins:dict"]')  # it fails if it is made
    found = facts(succeed("train", *words, *tracked, "--steps", 2, "--dry-run", "--timed").stdout)
    assert "the tracker" not in caplog.text
    assert found["steps"].startswith("2, ")
    assert re.fullmatch(r"\d+ s, [\d.e-]+ s a step, without evaluations", found["time"])
    assert [*tmp_path.rglob("*")] == [tmp_path / "aside"]
    assert facts(succeed("train", *words, "--dry-run").stdout)["time"].startswith("add --timed ")
    for wrong in (["--timed"], ["--dry-run", "--timed", "--resume"]):
        refused = train(*words, *wrong)
        assert (refused.exit_code, "--timed is for" in refused.stderr) == (2, True)


@pytest.mark.wide
def test_a_dry_run_on_two_ranks_prints_once_and_writes_nothing(pairs_dataset, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["--data", pairs_dataset.path, "--out", tmp_path / "run", *sets(*TINY), "--dry-run"]
    command = [*torchrun, "-m", "thermopile", "train", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parameters  ") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(pairs_dataset, tmp_path):
    (tmp_path / "file").touch()
    words = ["--data", pairs_dataset.path, "--out", tmp_path / "file" / "run", *sets(*TINY)]
    for more in (["--dry-run"], []):
        assert_one_line(train(*words, *more), 1, "file/run cannot be written; choose another directory with --out")


def test_forty_samples_train_with_what_is_chosen_for_them(images_dataset, tmp_path):
    few = tmp_path / "few.parquet"
    pq.write_table(pa.table({"sample_id": np.arange(40)}), few)
    succeed(
        "train", "--data", images_dataset.path, "--out", tmp_path / "run", "--select", few, "--steps", 1,
        *sets("data.image_size=16", "model.dim=8"),
    )  # fmt: skip


@pytest.mark.parametrize(("first", "match"), [(0, "step 1 would keep 0 of its"), (2_000, "has sample 2,250, but")])
def test_samples_that_training_would_not_leave_out_are_refused(pairs_dataset, tmp_path, first, match):
    kept, gone = tmp_path / "kept.parquet", tmp_path / "gone.parquet"
    pq.write_table(pa.table({"sample_id": np.arange(1, 2_000)}), kept)
    pq.write_table(named_ids(pairs_dataset, np.arange(first, first + 251)), gone)
    data = ["--data", pairs_dataset.path, "--select", kept, "--without", gone]
    words = [*data, "--out", tmp_path / "run", *sets(*TINY, "order.canonical_shards=8"), "--dry-run"]
    assert_one_line(train(*words), 2, match)
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
@pytest.mark.parametrize("setting", WRONG)
def test_what_training_refuses_is_refused_alike(pairs_dataset, tmp_path, setting):
    words = ["--data", pairs_dataset.path, "--out", tmp_path / "run", *sets(*TINY, setting)]
    dry, real = train(*words, "--dry-run"), train(*words)
    assert dry.exit_code == real.exit_code != 0
    measured = re.compile(r"[\d,]+ samples a second")
    assert measured.sub("", dry.stderr) == measured.sub("", real.stderr)
    assert list(tmp_path.iterdir()) == []
