"""A batch that is encoded piece by piece: the gradients and the state of one that is encoded at once."""

import copy
import json

import pytest
import torch
from torch import nn

from thermopile.pipeline.batch import Batch
from thermopile.pipeline.dataset.index import TokenizerInfo
from thermopile.state_store.reader import StateReader
from thermopile.trainer.config import EncoderConfig, ModelConfig
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.encoders.micro_batches import MicroBatches, OnePiece
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.metrics.step_clock import StepClock
from thermopile.trainer.objectives import Progress, create_objective
from thermopile.trainer.precision import MixedPrecision
from thermopile.trainer.run_directory import RunDirectory

from support.objectives import FRAMED
from support.runs import losses, small, train

CPU, ROWS, START = torch.device("cpu"), 24, Progress(step=0, steps_per_epoch=10)
TOKENIZER = TokenizerInfo(vocab_size=20, context_length=5, end_id=1)


def seed(piece):
    torch.manual_seed(100 + piece)


def model(**more):
    return ModelConfig(dim=6, image=EncoderConfig(name="conv", config={"width": 2}), text=EncoderConfig(
        name="mean_embedding", config={"width": 4}), **more)  # fmt: skip


def batch_of(mode, dtype, local=0):
    torch.manual_seed(1)
    views = tuple(torch.randn(ROWS, 3, 16, 16, dtype=dtype) for _ in range(1 if mode == "bimodal" else 2))
    of_local = tuple(torch.randn(ROWS, 3, 8, 8, dtype=dtype) for _ in range(local))
    tokens = torch.randint(2, 20, (ROWS, 5)) if mode == "bimodal" else None
    return Batch(torch.arange(ROWS), views, tokens, of_local)


def pieces_of(batch, rows):
    cut = [batch.sample_ids.split(rows), *(view.split(rows) for view in (*batch.views, *batch.local))]
    tokens = batch.tokens.split(rows) if batch.tokens is not None else [None] * len(cut[0])
    views = len(batch.views)
    return [Batch(ids, tuple(of[:views]), words, tuple(of[views:]))
            for (ids, *of), words in zip(zip(*cut, strict=True), tokens, strict=True)]  # fmt: skip


def step(encoders, pieces, objective=None):
    """Return the outcome of a step on a batch in these pieces; its gradients are the encoders'."""
    shared = encoders, MixedPrecision("float32", CPU), CPU, StepClock(CPU)
    encoder = OnePiece(*shared) if len(pieces) == 1 else MicroBatches(encoders, *shared, seed)
    seed(0)
    _, features = encoder.encode(pieces)
    if objective is None:
        objective = create_objective("simclr", "unimodal" if features.keys or encoders.text is None else "bimodal")
    dtype = features.first.dtype
    state = {field: torch.full((ROWS,), value, dtype=dtype) for field, value in objective.fields.items()}
    state |= {"visits": torch.zeros(ROWS, dtype=torch.uint32)} if state else {}
    outcome = objective(features.first, features.second, state, START, features.keys, features.local)
    outcome.loss.backward()
    encoder.finish_backward()
    return outcome


def gradients(network):
    return torch.cat([weight.grad.flatten() for weight in network.parameters() if weight.grad is not None])


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def relative(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("case", FRAMED, ids=lambda case: f"{case[0]}-{case[1]}{case[2]}")
def test_gradients_and_state_are_those_of_the_batch_at_once(case, dtype, tolerance):
    name, mode, frame = case
    objective = create_objective(name, mode).to(dtype)
    settings = model(momentum=0.9 if frame.keys else 0.0)
    torch.manual_seed(0)
    encoders = Encoders.create(settings, mode, 16, TOKENIZER, unit_norm=objective.unit_norm).to(dtype)
    batch, found = batch_of(mode, dtype, frame.local), []
    for rows in (ROWS, [5, 11, 8]):  # of different sizes, as holes leave them
        own, own_objective = copy.deepcopy(encoders), copy.deepcopy(objective)
        outcome = step(own, pieces_of(batch, rows), own_objective)
        found.append((gradients(own), [weight.grad for weight in own_objective.parameters()], outcome))
    (whole, of_own, at_once), (summed, of_own_pieces, in_pieces) = found
    assert relative(summed, whole) <= tolerance
    if of_own:
        assert relative(flat(of_own_pieces), flat(of_own)) <= tolerance
    for field, values in at_once.state.items():
        torch.testing.assert_close(in_pieces.state[field], values, rtol=1e-5, atol=1e-5)


class WithDropout(nn.Dropout):
    """Remembers what it lets through."""

    def forward(self, inputs):
        kept = super().forward(inputs)
        self.seen.append((kept == 0).clone())
        return kept


def test_a_piece_has_the_same_dropout_both_times_and_pieces_differ():
    encoders = Encoders.create(model(), "unimodal", 16, None)
    dropout = WithDropout(0.5)
    dropout.seen = []
    encoders.image.head = nn.Sequential(dropout, encoders.image.head)
    step(encoders, pieces_of(batch_of("unimodal", torch.float32), 12))
    one, two, one_again, two_again = dropout.seen
    assert torch.equal(one, one_again)
    assert torch.equal(two, two_again)
    assert not torch.equal(one, two)


def test_what_the_objective_draws_does_not_depend_on_the_pieces():
    batch, found = batch_of("unimodal", torch.float64), []
    for rows in (ROWS, 6):
        torch.manual_seed(0)
        encoders = Encoders.create(model(), "unimodal", 16, None).double()
        step(encoders, pieces_of(batch, rows), create_objective("decl", "unimodal", auxiliary="sample"))
        found.append(gradients(encoders))
    assert relative(found[1], found[0]) <= 1e-12


def test_a_batch_norms_running_mean_takes_in_every_piece_once():
    normed = model().model_copy(update={"image": EncoderConfig(name="conv", config={"width": 2, "batch_norm": True})})
    torch.manual_seed(0)
    encoders = Encoders.create(normed, "unimodal", 16, None)
    expected = copy.deepcopy(encoders)
    pieces = pieces_of(batch_of("unimodal", torch.float32), 12)
    with torch.no_grad():
        for piece in pieces:
            expected(piece)
    step(encoders, pieces)
    for buffer, wanted in zip(encoders.buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, wanted)


def test_nothing_of_a_batch_is_kept_after_its_step():
    encoders = Encoders.create(model(), "unimodal", 16, None)
    shared = encoders, MixedPrecision("float32", CPU), CPU, StepClock(CPU)
    encoder = MicroBatches(encoders, *shared, seed)
    _, features = encoder.encode(pieces_of(batch_of("unimodal", torch.float32), 12))
    (features.first * features.second).sum().backward()
    encoder.finish_backward()
    assert not encoder._waiting
    assert not encoder._features


# Runs


def test_a_run_in_pieces_has_nearly_the_losses_of_one_that_encodes_batches_at_once(pairs_dataset, tmp_path):
    # Encoders in which other shapes of products round otherwise.
    config = small(pairs_dataset, epochs=1, model={"dim": 16, "image": {"config": {"width": 8}}})
    whole = train(config, tmp_path / "whole")
    pieces = train(config.model_copy(update={"micro_batch": 32}), tmp_path / "pieces")
    assert losses(pieces) == pytest.approx(losses(whole), rel=1e-3)
    assert losses(pieces) != losses(whole), "the batch was not cut"


def test_every_sample_of_a_batch_is_visited_once_a_step(pairs_dataset, tmp_path):
    run = train(small(pairs_dataset, micro_batch=32, epochs=1), tmp_path / "run")
    waits = [json.loads(line)["data_wait_seconds"] for line in run.metrics_file.read_text().splitlines()]
    assert len(waits) == 7
    assert StateReader.open(run.state).column("visits").sum() == 7 * 256


@pytest.mark.parametrize(("size", "cure"), [(48, "use 32, or 0"), (200, "use 128, or 0")])
def test_pieces_that_do_not_make_up_a_batch_are_refused_with_a_size_that_does(pairs_dataset, size, cure):
    with pytest.raises(ConfigError, match=f"micro_batch = {size} does not divide the 256 samples of a batch; {cure}"):
        small(pairs_dataset, micro_batch=size)


def test_batch_norms_over_pieces_are_told(pairs_dataset, tmp_path):
    tree = {"model": {"dim": 16, "image": {"config": {"width": 8, "batch_norm": True}}}}
    with Trainer.open(small(pairs_dataset, micro_batch=32, **tree), RunDirectory(tmp_path / "run")) as trainer:
        assert any("the statistics of a piece, 1/8 of the batch" in advice for advice in trainer.advice())
