"""The seconds of a step as the benchmark of checkpoints takes them."""

import time
from itertools import pairwise

import pytest

from thermopile.benchmarks.step import run
from thermopile.tools.bench.step import open_trainer, synthetic_dataset
from thermopile.trainer.config.layers import read_preset


@pytest.fixture
def trainer(tmp_path):
    """A run on random batches of 32."""
    dataset = synthetic_dataset(tmp_path / "dataset", 256)
    data = {"loader": "synthetic", "image_size": 32}
    with open_trainer(
        dataset, read_preset("glyphs") | {"device": "cpu", "batch_size": 32, "data": data}, 8, tmp_path
    ) as opened:
        yield opened


def test_the_time_of_a_step_is_the_trainers_and_not_of_what_goes_on_between_steps(trainer):
    done_before, between_steps = [], []

    def between(done):
        done_before.append((done, trainer.run.steps_done))
        began = time.perf_counter()
        time.sleep(0.3)
        between_steps.append((began, time.perf_counter()))

    seconds = run(trainer, 3, between)
    assert done_before == [(1, 1), (2, 2), (3, 3)]
    assert len(seconds) == 3
    for step, (before, after) in enumerate(pairwise(between_steps), start=1):
        assert seconds[step] <= after[0] - before[1]
