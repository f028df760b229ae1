"""The rows of samples beside another library's loop and checkpoints."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from thermopile import Loader, RowStore, StateReader
from thermopile.benchmarks.object_server import uploaded
from thermopile.state_store.errors import SnapshotNotFoundError
from thermopile.storage.bucket import Address
from thermopile.storage.place import place_of
from thermopile.trainer.errors import ConfigError, RunError
from thermopile.trainer.world import World

from support.cli import answer

SETTINGS = {
    "batch_size": 256, "data": {"image_size": 16, "workers": 1}, "objective": {"name": "isogclr", "tau_init": 0.05},
}  # fmt: skip


@pytest.fixture
def loader(pairs_dataset):
    with Loader(pairs_dataset.path, SETTINGS) as loader:
        yield loader


def drawn_features(rows, number):
    """Features of the batch `number`, not yet of norm 1, and its ids."""
    place = divmod(number, rows.order.steps_per_epoch)
    ids = torch.from_numpy(rows.order.batch_ids(*place))
    drawn = torch.Generator().manual_seed(number)
    return *(torch.randn(len(ids), 8, generator=drawn) for _ in range(2)), ids


def step(rows, number):
    """The loss of one step without a model."""
    first, second, ids = drawn_features(rows, number)
    return float(rows.loss(F.normalize(first, dim=1).requires_grad_(), F.normalize(second, dim=1), ids).detach())


def written(path, at="latest"):
    reader = StateReader.open(place_of(path) / "state", at=at)
    return {name: np.asarray(reader.column(name)) for name in reader.columns}


def assert_same(one, other):
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name])


@pytest.fixture
def whole(loader, tmp_path):
    """The rows of ten steps that nothing interrupted, and their losses."""
    with RowStore(tmp_path / "whole", loader) as rows:
        losses = [step(rows, number) for number in range(10)]
        rows.checkpoint()
    return written(tmp_path / "whole"), losses


def test_rows_go_back_to_an_older_checkpoint_and_on_as_if_never_stopped(loader, whole, tmp_path):
    with RowStore(tmp_path / "rows", loader) as rows:
        losses = [step(rows, number) for number in range(4)]
        checkpoint = rows.state_dict()
        for number in range(4, 8):
            step(rows, number)
        rows.checkpoint()  # a later one, that the other trainer's checkpoint did not survive
        step(rows, 9)
    with RowStore(tmp_path / "rows", loader) as rows:
        rows.load_state_dict(checkpoint)
        assert rows.steps_done == 4
        losses += [step(rows, number) for number in range(4, 10)]
        rows.checkpoint()
    assert losses == whole[1]
    assert_same(written(tmp_path / "rows"), whole[0])


@pytest.mark.wide
def test_rows_and_samples_in_a_bucket_are_as_those_on_disk(pairs_dataset, whole, s3, monkeypatch, tmp_path):
    monkeypatch.setenv("THERMOPILE_CACHE", str(tmp_path / "cache"))
    place, rows_place, losses = uploaded(pairs_dataset.path, Address("bucket", "pairs")), Address("bucket", "rows"), []
    checkpoint = None
    with Loader(place, SETTINGS) as loader:
        for stop in (4, 10):
            with RowStore(rows_place, loader) as rows:
                if checkpoint:
                    rows.load_state_dict(checkpoint)
                losses += [step(rows, number) for number in range(rows.steps_done, stop)]
                checkpoint = rows.state_dict()
    assert losses == whole[1]
    assert_same(written(rows_place), whole[0])


@pytest.mark.wide
def test_a_compiled_step_has_the_same_losses(loader, whole, tmp_path):
    with RowStore(tmp_path / "rows", loader) as rows:

        @torch.compile(backend="aot_eager")  # all of torch.compile but the C++ that it would write
        def loss_of(first, second, ids):
            return rows.loss(F.normalize(first, dim=1), F.normalize(second, dim=1), ids)

        losses = []
        for number in range(10):
            first, second, ids = drawn_features(rows, number)
            loss = loss_of(first.requires_grad_(), second, ids)
            loss.backward()
            assert first.grad.abs().sum() > 0
            losses.append(float(loss.detach()))
    assert losses == pytest.approx(whole[1], abs=1e-5)


def test_rows_that_wait_for_a_checkpoint_are_not_mixed_with_new_weights(loader, whole, tmp_path):
    with RowStore(tmp_path / "whole", loader) as rows:
        with pytest.raises(RunError, match="holds rows of step 10, but no checkpoint was loaded"):
            step(rows, 0)
        rows.load_state_dict({"snapshot": "step-0"})
        assert [step(rows, number) for number in range(10)] == whole[1]
    with RowStore(tmp_path / "again", loader) as rows:  # killed before its first checkpoint
        step(rows, 0)
    with RowStore(tmp_path / "again", loader) as rows:
        assert step(rows, 0) == whole[1][0]


def test_rows_older_than_the_checkpoint_or_of_another_run_are_refused_and_stay(loader, whole, tmp_path):
    with RowStore(tmp_path / "other", loader) as rows:
        step(rows, 0)
        checkpoint = rows.state_dict()
    with RowStore(tmp_path / "whole", loader) as rows:
        with pytest.raises(SnapshotNotFoundError, match="has no snapshot"):
            rows.load_state_dict(checkpoint)
        with pytest.raises(RunError, match="no checkpoint was loaded"):
            step(rows, 10)
    assert_same(written(tmp_path / "whole"), whole[0])


@pytest.mark.parametrize("change", [{"seed": 3}, {"objective": {"name": "fastclip_v3"}}])
def test_rows_made_with_other_settings_are_refused(loader, pairs_dataset, tmp_path, change):
    RowStore(tmp_path / "rows", loader).close()
    with (
        Loader(pairs_dataset.path, SETTINGS | change) as other,
        pytest.raises(ConfigError, match=r"holds rows made otherwise: (seed|objective.*): the run has"),
    ):
        RowStore(tmp_path / "rows", other)


def test_parameters_of_the_objective_are_part_of_a_checkpoint(pairs_dataset, tmp_path):
    settings = SETTINGS | {"objective": {"name": "fastclip_v3"}}
    with Loader(pairs_dataset.path, settings) as loader, RowStore(tmp_path / "rows", loader) as rows:
        step(rows, 0)
        checkpoint = {key: dict(value) if key == "objective" else value for key, value in rows.state_dict().items()}
        checkpoint["objective"] = {key: value.clone() for key, value in checkpoint["objective"].items()}
        (temperature,) = rows.objective.parameters()
        before = temperature.item()
        with torch.no_grad():
            temperature.add_(1)
        rows.load_state_dict(checkpoint)
        assert temperature.item() == before


def test_ranks_without_a_group_are_refused(pairs_dataset, tmp_path):
    with (
        Loader(pairs_dataset.path, SETTINGS, world=World(1, 2)) as loader,
        pytest.raises(ConfigError, match=r"need torch\.distributed"),
    ):
        RowStore(tmp_path / "rows", loader)


def test_inspect_reads_the_directory_as_a_runs(loader, tmp_path):
    with RowStore(tmp_path / "rows", loader) as rows:
        for number in range(7):
            step(rows, number)
        rows.checkpoint()
    found = answer("inspect", tmp_path / "rows")
    assert found["samples"] == loader.dataset.n
    assert sum(kind["samples"] for kind in found["kinds"]) > 0 if isinstance(found["kinds"], list) else found["kinds"]
