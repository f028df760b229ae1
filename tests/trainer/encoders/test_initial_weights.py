"""A new run from the weights of another: which checkpoint, and that every weight fits."""

import pytest
import torch

from thermopile.pipeline.dataset.index import TokenizerInfo
from thermopile.trainer.checkpoints.checkpoint_files import load_checkpoint, save_checkpoint
from thermopile.trainer.config import ModelConfig, TrainConfig, load_config
from thermopile.trainer.encoders import Encoders, with_names
from thermopile.trainer.encoders.initial_weights import is_same_source, load_initial_weights, pinned
from thermopile.trainer.errors import ConfigError, RunError
from thermopile.trainer.run_directory import RunDirectory

from support.written_checkpoints import write_checkpoint


def encoders(mode="bimodal", dim=4, vocab_size=50, **more):
    sides = {"image": {"name": "conv", "config": {"width": 2}}, "text": {"config": {"width": 3}}}
    model = ModelConfig(dim=dim, **(sides | more))
    tokenizer = TokenizerInfo(vocab_size=vocab_size, context_length=8, end_id=2)
    return Encoders.create(with_names(model), mode, 16, tokenizer)


def write_run(path, made, steps=(3, 10)):
    run = RunDirectory(path)
    run.create(TrainConfig(), lambda: None)
    for step in steps:
        write_checkpoint(run, step, encoders=made.state_dict())
    return path


def weights(module):
    return torch.cat([value.flatten() for value in module.state_dict().values()])


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", encoders())


def test_the_latest_checkpoint_is_pinned_where_no_step_is_given(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    assert pinned("run") == pinned(f"{run}@step-10") == f"{run}@step-10"
    assert pinned("run@step-3") == f"{run}@step-3"


def test_a_run_or_step_that_is_not_there_is_named(run, tmp_path):
    with pytest.raises(RunError, match=r"none is not a run; give a run's directory"):
        pinned(str(tmp_path / "none"))
    with pytest.raises(RunError, match=r"run has no checkpoint 'step-7'; available: step-3, step-10$"):
        pinned(f"{run}@step-7")
    with pytest.raises(RunError, match=r"empty has no checkpoint yet"):
        pinned(str(write_run(tmp_path / "empty", encoders(), steps=())))


@pytest.mark.parametrize(
    ("asked", "is_same"), [("/a", True), ("/b/../a", True), ("/a@step-3", True), ("/a@step-4", False), ("/b", False),
                           ("", False)]
)  # fmt: skip
def test_a_job_script_may_name_the_run_that_a_begun_one_started_from(asked, is_same):
    assert is_same_source(asked, "/a@step-3") == is_same


def test_both_encoders_get_the_weights_of_the_checkpoint(tmp_path):
    source, fresh = encoders(), encoders()
    load_initial_weights(fresh, pinned(str(write_run(tmp_path / "run", source))))
    assert torch.equal(weights(fresh), weights(source))


def test_a_unimodal_run_takes_the_image_encoder_of_a_bimodal_one(tmp_path):
    source, fresh = encoders(), encoders("unimodal")
    load_initial_weights(fresh, pinned(str(write_run(tmp_path / "run", source))))
    assert torch.equal(weights(fresh), weights(source.image))


@pytest.mark.parametrize("side", ["image", "text"])
def test_one_side_takes_its_weights_and_the_other_one_may_have_another_shape(side, tmp_path):
    source = encoders()
    other = {"vocab_size": 60} if side == "image" else {"image": {"name": "conv", "config": {"width": 4}}}
    fresh = encoders(**other)
    start = {name: weights(network) for name, network in fresh.named_children()}
    load_initial_weights(fresh, pinned(str(write_run(tmp_path / "run", source))), side)
    for name, network in fresh.named_children():
        expected = weights(getattr(source, name)) if name == side else start[name]
        assert torch.equal(weights(network), expected)


def test_a_side_that_one_of_the_runs_does_not_have_is_refused(tmp_path):
    unimodal = pinned(str(write_run(tmp_path / "run", encoders("unimodal"))))
    with pytest.raises(
        ConfigError, match=r"init\.sides = 'text', but .+step-10 has no text encoder; start from another"
    ):
        load_initial_weights(encoders(), unimodal, "text")
    with pytest.raises(ConfigError, match=r"init\.sides = 'text', but a run on images has no text"):
        load_initial_weights(encoders("unimodal"), unimodal, "text")


def test_sides_without_a_run_to_start_from_are_refused():
    with pytest.raises(ConfigError, match=r"init: sides 'image' needs init\.run \(--init-from\), the run that gives"):
        load_config({"init": {"sides": "image"}})


@pytest.mark.parametrize("of_source", [{}, {"momentum": 0.9}])
def test_a_momentum_network_starts_as_the_image_encoder_whatever_is_loaded(of_source, tmp_path, caplog):
    source, fresh = encoders("unimodal", **of_source), encoders("unimodal", momentum=0.9, predictor="moco_v3")
    if source.momentum is not None:
        source.momentum.backbone.body[0].weight.fill_(5.0)
    load_initial_weights(fresh, pinned(str(write_run(tmp_path / "run", source))))
    assert torch.equal(weights(fresh.image), weights(source.image))
    assert torch.equal(weights(fresh.momentum), weights(source.image))
    assert "has no predictor; this run initialises its own" in caplog.text


def test_a_bimodal_run_from_a_unimodal_one_keeps_its_own_text_encoder_and_says_so(tmp_path, caplog):
    source, fresh = encoders("unimodal"), encoders()
    text = weights(fresh.text)
    load_initial_weights(fresh, pinned(str(write_run(tmp_path / "run", source))))
    assert torch.equal(weights(fresh.image), weights(source))
    assert torch.equal(weights(fresh.text), text)
    assert "step-10 has no text encoder" in caplog.text


@pytest.mark.parametrize(
    ("other", "words"),
    [({"dim": 6}, r"image\.\S+ is \[4\S*\] there, but \[6\S*\] in this run"),
     ({"vocab_size": 60}, r"text\.\S+ is \[50, 3\] there, but \[60, 3\]")],
)  # fmt: skip
def test_encoders_of_another_shape_are_refused_naming_the_first_weight_that_differs(run, other, words):
    fresh = encoders(**other)
    before = weights(fresh)
    with pytest.raises(ConfigError, match=words):
        load_initial_weights(fresh, pinned(str(run)))
    if "dim" in other:
        assert torch.equal(weights(fresh), before)


def test_a_checkpoint_that_is_gone_or_no_checkpoint_is_named(run):
    with pytest.raises(RunError, match=r"step-7, which the run starts from, is missing"):
        load_initial_weights(encoders(), f"{run}@step-7")
    info, _ = load_checkpoint(run / "checkpoints/step-3")
    save_checkpoint(run / "checkpoints", info, {"encoders": [1]})
    with pytest.raises(RunError, match=r"step-3 contains no encoders"):
        load_initial_weights(encoders(), f"{run}@step-3")
    (run / "checkpoints/step-10/tensors.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"step-10 is damaged"):
        load_initial_weights(encoders(), f"{run}@step-10")
