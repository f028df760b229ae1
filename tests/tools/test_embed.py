"""`thermopile embed`: the features that evaluation has, in one file that is whole or absent."""

import shutil
import threading
import time
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from thermopile.pipeline.dataset.tokenizer import load_tokenizer
from thermopile.pipeline.opening import Dataset
from thermopile.tools import embed
from thermopile.trainer.checkpoints.checkpoint_files import load_checkpoint
from thermopile.trainer.config import load_config
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.evaluation.features import (
    restore_encoders,
    some_features,
    text_features,
)
from thermopile.trainer.run.build import recipe_named, resolve
from thermopile.trainer.run.own_dataset import keep_facts
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, succeed
from support.damage import flip
from support.features import sample_features
from support.written_checkpoints import write_checkpoint

CPU = torch.device("cpu")


def quiet(done, total):
    pass


def run_with_random_weights(path, dataset):
    """Checkpoints 1 and 2 of different weights."""
    settings = {
        "batch_size": 16, "data": {"path": str(dataset.path), "image_size": 16},
        "model": {"dim": 6, "image": {"name": "conv", "config": {"width": 2}}},
    }  # fmt: skip
    config = resolve(load_config(settings), dataset)[0]
    run = RunDirectory(path)
    run.create(config, partial(keep_facts, run, dataset))
    for step in (1, 2):
        torch.manual_seed(step)
        encoders = Encoders.create(config.model, config.objective.mode, 16, dataset.index.tokenizer)
        write_checkpoint(run, step, dataset_fingerprint=dataset.index.fingerprint, encoders=encoders.state_dict())
    return run


@pytest.fixture(scope="module")
def run(captions_dataset, tmp_path_factory):
    return run_with_random_weights(tmp_path_factory.mktemp("runs") / "pairs", captions_dataset)


def encoders_of(run, dataset, step=2):
    checkpoint = run.checkpoints / f"step-{step}"
    return restore_encoders(run.config(), checkpoint, load_checkpoint(checkpoint)[1], dataset.index.tokenizer)


def view(run):
    data = run.config().data
    return recipe_named(data.recipe), data.image_size, CPU


def side(table, name):
    return np.stack(table[name].to_numpy())


def test_the_rows_are_all_samples_with_the_features_that_evaluation_has(run, captions_dataset, tmp_path):
    succeed("embed", run.path, captions_dataset.path, tmp_path / "at.parquet", "--dtype", "float", "--at", "step-1")
    table = pq.read_table(tmp_path / "at.parquet")
    assert table.column_names == ["sample_id", "key", "image", "text"]
    assert [str(field.type) for field in table.schema] == [
        "int64",
        "string",
        *["fixed_size_list<element: float>[6]"] * 2,
    ]
    assert table["sample_id"].to_pylist() == list(range(captions_dataset.n))
    assert table["key"].to_pylist() == captions_dataset.column("key").to_pylist()
    ids = np.arange(captions_dataset.n)
    pictures, captions = sample_features(encoders_of(run, captions_dataset, 1), captions_dataset, ids, *view(run))
    assert np.array_equal(side(table, "image"), pictures.numpy())
    assert np.array_equal(side(table, "text"), captions.numpy())  # of the first captions' stored tokens
    facts = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert facts == {
        "thermopile.run": str(run.path), "thermopile.checkpoint": "step-1", "thermopile.weights": "raw",
        "thermopile.dataset": captions_dataset.absolute,
        "thermopile.dataset_fingerprint": captions_dataset.index.fingerprint,
    }  # fmt: skip


def test_half_precision_is_the_default_and_row_groups_are_bounded(run, captions_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(embed, "ROW_GROUP", 200)
    for dtype in ("half", "float"):
        succeed("embed", run.path, captions_dataset.path, tmp_path / f"{dtype}.parquet", "--dtype", dtype)
    out = tmp_path / "new.parquet"
    assert succeed("embed", run.path, captions_dataset.path, out, "--batch", 50).stdout.split() == [str(out)]
    half, single, default = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("half", "float", "new"))
    for name in ("image", "text"):
        assert str(default.schema.field(name).type) == "fixed_size_list<element: halffloat>[6]"
        assert np.array_equal(side(half, name), side(single, name).astype(np.float16))
        assert np.allclose(side(default, name), side(half, name), atol=1e-3)
        assert np.allclose(np.linalg.norm(side(single, name), axis=1), 1)
    stored = pq.ParquetFile(out).metadata
    assert [stored.row_group(group).num_rows for group in range(stored.num_row_groups)] == [200, 200, 112]


def test_captions_of_another_dataset_are_read_with_the_run_s_own_tokenizer(
    run, captions_dataset, hostile_dataset, tmp_path
):
    succeed("embed", run.path, hostile_dataset.path, tmp_path / "other.parquet", "--dtype", "float")
    tokenizer = load_tokenizer(
        captions_dataset.tokenizer_path, context_length=captions_dataset.index.tokenizer.context_length
    )
    captions = [caption or "" for caption in hostile_dataset.column("caption").to_pylist()]
    expected = text_features(encoders_of(run, captions_dataset).text, tokenizer, captions, CPU, quiet)
    assert np.array_equal(side(pq.read_table(tmp_path / "other.parquet"), "text"), expected.numpy())


def test_pictures_alone_have_one_side(run, images_dataset, tmp_path):
    alone = run_with_random_weights(tmp_path / "run", images_dataset)
    for of in (run, alone):
        out = tmp_path / f"{of.path.name}.parquet"
        succeed("embed", of.path, images_dataset.path, out, "--overwrite")
        assert pq.read_schema(out).names == ["sample_id", "key", "image"]


def test_a_disk_that_fills_or_a_damaged_sample_leaves_the_file_that_was_there(
    run, captions_dataset, tmp_path, file_size_limit
):
    out, damaged = tmp_path / "out.parquet", tmp_path / "damaged"
    out.write_bytes(b"of before")
    words = ("embed", run.path, captions_dataset.path, out)
    assert_one_line(cli(*words), 2, "exists", "--overwrite")
    with file_size_limit(4096):
        assert_one_line(cli(*words, "--overwrite"), 1, "File too large")
    shutil.copytree(captions_dataset.path, damaged)
    place = int(captions_dataset.shard(0).records()["jpeg_at"][400]) + 50
    flip(damaged / "shards" / "shard-00000.beton", 8 * place)
    assert_one_line(cli("embed", run.path, damaged, out, "--overwrite", "--batch", 100), 1, "sample 400")
    assert out.read_bytes() == b"of before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "out.parquet"]


def test_features_are_made_no_further_ahead_than_two_batches_and_no_thread_stays(run, captions_dataset):
    before, read = threading.active_count(), []
    tokenizer = load_tokenizer(
        captions_dataset.tokenizer_path, context_length=captions_dataset.index.tokenizer.context_length
    )

    class Watched(Dataset):
        def tables(self, names, rows):
            for table in super().tables(names, rows):
                read.append(len(table))
                yield table

    of = encoders_of(run, captions_dataset), Watched(captions_dataset.path), None, *view(run)
    made = some_features(*of, tokenizer=tokenizer, rows=16)
    for taken in range(1, 4):
        assert [len(of_side) for of_side in next(made)] == [16, 16]
        time.sleep(0.1)  # time enough for many more
        assert len(read) <= taken + 2
    made.close()
    assert threading.active_count() == before


def test_a_run_or_a_name_that_is_none_is_refused(run, captions_dataset, tmp_path):
    assert_one_line(cli("embed", tmp_path, captions_dataset.path, tmp_path / "x.parquet"), 1, "is not a run")
    assert_one_line(cli("embed", run.path, captions_dataset.path, tmp_path / "x.npy"), 2, "does not end in .parquet")
    assert_one_line(
        cli("embed", run.path, captions_dataset.path, tmp_path / "x.parquet", "--at", "step-9"), 1, "available: step-1"
    )
