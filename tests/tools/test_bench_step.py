"""`thermopile bench step` at its small scale: what it does and prints, never how fast it was."""

import json
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from click.testing import CliRunner

from thermopile.tools.bench.step import checkpoint, overhead
from thermopile.tools.bench.step.bare import BareLoop
from thermopile.tools.bench.step.checkpoint import Seconds, seconds_of
from thermopile.tools.bench.step.command import PARTS
from thermopile.tools.bench.step.sizes import FULL, SMALL, CheckpointSizes
from thermopile.tools.bench.step.training import BatchesInMemory, run
from thermopile.tools.cli import main
from thermopile.trainer.build import resolve
from thermopile.trainer.config import load_config
from thermopile.trainer.config_layers import merge, read_preset
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory


@pytest.fixture
def trainer(pairs_dataset, tmp_path):
    """A run on 2,000 pairs that begins with 32."""
    tree = read_preset("glyphs")
    merge(tree, {"device": "cpu", "batch_size": 32, "data": {"path": str(pairs_dataset.path)}})
    with Trainer.open(resolve(load_config(tree), pairs_dataset), RunDirectory(tmp_path / "run")) as opened:
        yield opened


def test_a_batch_in_memory_has_the_ids_of_its_step_in_every_epoch(trainer):
    order, shown = trainer.order, list(trainer.loader.epoch(0))
    batches = BatchesInMemory(shown, order, lambda done, batches: None)
    for epoch, first_step in ((0, 0), (1, order.steps_per_epoch - 2)):
        coming = list(batches.epoch(epoch, first_step))
        assert len(coming) == order.steps_per_epoch - first_step
        for step, batch in enumerate(coming, first_step):
            assert batch.sample_ids.tolist() == order.batch_ids(epoch, step).tolist()
            assert batch.views[0] is shown[step].views[0]


def test_the_time_of_a_step_is_the_trainers_and_not_of_what_goes_on_between_steps(trainer):
    done_before, between_steps = [], []

    def between(done, batches):
        done_before.append((done, trainer.steps_done))
        began = time.perf_counter()
        time.sleep(0.3)
        between_steps.append((began, time.perf_counter()))

    seconds = run(trainer, 3, between)
    assert done_before == [(1, 1), (2, 2), (3, 3)]
    assert len(seconds) == 3
    for step, (before, after) in enumerate(pairwise(between_steps), start=1):
        assert seconds[step] <= after[0] - before[1]
    lines = [json.loads(line) for line in trainer.run_directory.metrics_file.read_text().splitlines()]
    assert all(line["data_wait_seconds"] > 0.29 for line in lines[1:])


def test_the_bare_loop_computes_what_the_trainer_computes(trainer):
    bare = BareLoop(trainer.config, trainer.dataset, trainer.order.steps_per_epoch, trainer.total_steps)
    begun = {name: weight.clone() for name, weight in bare.encoders.state_dict().items()}
    batch = next(iter(trainer.loader.epoch(0)))
    bare.seconds([batch])
    trainer.step(batch)
    for name, weight in trainer.encoders.state_dict().items():
        assert torch.equal(bare.encoders.state_dict()[name], weight)
        assert not torch.equal(begun[name], weight)


def test_a_checkpoint_holds_up_by_what_its_step_takes_more_than_those_before_it():
    sizes = CheckpointSizes(checkpoints=1, quiet_steps=3, during_steps=2, warm_up_steps=1)
    first, quiet, during = [9.0] * 7, [1.0, 1.5, 1.0], [2.0, 1.25]
    steps = [*first, 9.0, 9.0, 9.0, *quiet, 1.75, *during]
    assert len(steps) == sizes.steps
    assert seconds_of(steps, 2, sizes, [7.0, 0.5]) == Seconds(quiet=1.0, held_up=0.75, slowed=2.0, saved=0.5)


def test_a_step_that_was_quicker_than_those_before_it_counts_below_zero():
    sizes = CheckpointSizes(checkpoints=1, quiet_steps=3, during_steps=2, warm_up_steps=1)
    steps = [*[9.0] * 10, 1.0, 1.0, 1.0, 0.75, 0.5, 1.0]
    assert seconds_of(steps, 2, sizes, [7.0, 0.5]) == Seconds(quiet=1.0, held_up=-0.25, slowed=-0.75, saved=0.5)


def test_every_part_can_be_chosen_and_has_both_scales():
    assert set(PARTS) == set(FULL) == set(SMALL)


def test_the_overhead_is_measured_beside_the_bare_loop_round_by_round(tmp_path):
    sizes = SMALL["overhead"]
    measured = overhead.measure(sizes, tmp_path)
    step, beyond, *shares = measured.figures
    assert len(step.ratios) == sizes.rounds
    assert (step.alternative, step.ours) > (0, 0)
    assert (beyond.name, beyond.asked) == ("overhead_percent", "≤ 3 %")
    assert "store wait" in {share.label for share in shares}
    assert sum(share.ours for share in shares if share.label != "write backlog") == pytest.approx(100, abs=1)


def test_checkpoints_are_measured_beside_torch_save(tmp_path):
    sizes = replace(SMALL["checkpoint"], samples=64)
    measured = checkpoint.measure(sizes, tmp_path)
    figures = {figure.name: figure for figure in measured.figures}
    assert figures["held_up_steps"].asked == "≤ 1 steps"
    assert figures["held_up_ms"].alternative > 0
    steps = [int(folder.name.removeprefix("step-")) for folder in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert sizes.every_steps * (1 + sizes.checkpoints) in steps


@pytest.mark.soak
def test_the_command_prints_the_machine_and_the_figures_and_leaves_nothing(tmp_path):
    words = ["bench", "step", "--scale", "small", "--part", "checkpoint", "--json", "--dir", str(tmp_path)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["machine"]["cores"] > 0
    assert told["parts"]["checkpoint"]["figures"]["held_up_steps"]["held"] is None
    assert list(tmp_path.iterdir()) == []


def test_help_ends_with_an_example():
    help_text = CliRunner().invoke(main, ["bench", "step", "--help"]).stdout
    assert "thermopile bench step " in help_text.split("Example")[1]
