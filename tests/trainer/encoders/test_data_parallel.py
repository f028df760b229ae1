"""The encoders as a step calls them: another memory layout, or compiled code, and the same results."""

import json
import shutil
from functools import partial

import pytest
import torch

from thermopile.trainer.config import ModelConfig
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.encoders.data_parallel import refuse_compiler, refuse_unused_weights
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory

from support.runs import small, weights


def tiny(dataset, **more):
    return small(dataset, **{"optimizer": {"warmup": 0}} | more)


def train(config, path, until=14, resume=False):
    """Train until a number of steps is done, and stop with a checkpoint."""
    run = RunDirectory(path)
    with Trainer.open(config, run, resume=resume) as trainer:
        trainer.train(should_stop=lambda: trainer.run.steps_done == until)
    return run


def losses(run):
    return [json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(pairs_dataset, tmp_path_factory):
    return train(tiny(pairs_dataset), tmp_path_factory.mktemp("runs") / "plain")


def kernels(trainer):
    return [weight for weight in trainer.run.encoders.parameters() if weight.ndim == 4]


def test_channels_last_lays_kernels_out_so_and_changes_no_loss_beyond_round_off(plain, pairs_dataset, tmp_path):
    run = RunDirectory(tmp_path / "run")
    with Trainer.open(tiny(pairs_dataset, channels_last=True), run) as trainer:
        trainer.train()
        assert kernels(trainer)
        for kernel in kernels(trainer):
            assert kernel.is_contiguous(memory_format=torch.channels_last)
            assert not kernel.is_contiguous()
    assert losses(run) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["adamw", pytest.param("sgd", marks=pytest.mark.wide)])
def test_a_run_resumed_in_the_other_layout_goes_on_as_it_was(pairs_dataset, tmp_path, name):
    optimizer = {"name": name, "lr": 1e-2, "warmup": 0}
    config = tiny(pairs_dataset, optimizer=optimizer)
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "broken", until=7)
    broken = train(config.model_copy(update={"channels_last": True}), tmp_path / "broken", resume=True)
    assert losses(broken) == pytest.approx(losses(whole), rel=1e-4)


def assert_compiled_as(plain, pairs_dataset, path):
    """A compiled run has the plain one's losses and weights by the same names, and goes on without being compiled."""
    config = tiny(pairs_dataset, compile=True)
    run = train(config, path, until=7)
    assert losses(run) == pytest.approx(losses(plain)[:7], rel=1e-4)
    assert weights(run).keys() == weights(plain).keys()
    train(config.model_copy(update={"compile": False}), path, resume=True)
    assert losses(run) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.wide
def test_encoders_are_compiled_each_by_itself_and_a_checkpoint_does_not_show_it(
    plain, pairs_dataset, tmp_path, monkeypatch
):
    compiled = []

    def trace(graph, inputs):
        compiled.append(graph)
        return graph

    # All of torch.compile but the C++ compiler, which takes most of the time.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=trace))
    assert_compiled_as(plain, pairs_dataset, tmp_path / "run")
    assert len(compiled) == 2


@pytest.mark.soak
def test_encoders_in_compiled_code_have_the_losses_of_those_that_are_not(plain, pairs_dataset, tmp_path):
    assert_compiled_as(plain, pairs_dataset, tmp_path / "run")


@pytest.mark.wide
def test_a_run_with_a_compiled_objective_resumes_bit_for_bit_and_goes_on_without_a_compiler(
    plain, pairs_dataset, tmp_path
):
    config = tiny(pairs_dataset, objective={"compile": True})
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "broken", until=7)
    shutil.copytree(tmp_path / "broken", tmp_path / "elsewhere")
    assert losses(train(config, tmp_path / "broken", resume=True)) == losses(whole)
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-4)
    elsewhere = train(tiny(pairs_dataset), tmp_path / "elsewhere", resume=True)
    assert losses(elsewhere)[:7] == losses(whole)[:7]
    assert losses(elsewhere) == pytest.approx(losses(plain), rel=1e-4)


def test_an_own_encoder_with_unused_weights_is_refused_where_gpus_would_wait(pairs_dataset):
    def encoders(tower):
        model = ModelConfig(dim=4, image={"name": f"support.own_code:{tower}"}, text={"name": "support.own_code:Words"})
        return Encoders.create(model, "bimodal", 16, pairs_dataset.index.tokenizer)

    refuse_unused_weights(encoders("Tower"))
    wasteful = encoders("Wasteful").train()
    with pytest.raises(ConfigError) as refused:
        refuse_unused_weights(wasteful)
    assert str(refused.value) == (
        "model.image.name = 'support.own_code:Wasteful': in evaluation mode, its features do not depend on "
        "classifier.weight, classifier.bias. Several GPUs would wait for their gradients: choose another model, or in "
        "a module of yours set their requires_grad to False"
    )
    assert all(module.training for module in wasteful.modules())
    wasteful.image.backbone.body.classifier.requires_grad_(False)
    refuse_unused_weights(wasteful)


def test_autotuning_is_refused_on_a_gpu(monkeypatch):
    refuse_compiler()
    monkeypatch.setattr("torch._inductor.config.max_autotune", True)
    with pytest.raises(ConfigError, match="unset TORCHINDUCTOR_MAX_AUTOTUNE"):
        refuse_compiler()
