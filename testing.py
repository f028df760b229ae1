"""Checks of your own objectives, encoders, recipes and sources, for your tests: each raises AssertionError or returns.

from thermopile import testing

def test_my_loss():
    testing.check_objective("my_loss:MyLoss", "unimodal", tau=0.2)
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .pipeline.dataset.index import TokenizerInfo
from .trainer.config import EncoderConfig
from .trainer.encoders.own_backbone import own_backbone
from .trainer.objectives import Objective, Outcome, Progress, create_objective
from .trainer.objectives.base import WEIGHT
from .trainer.objectives.isogclr import IndividualTemperature, IsogclrSettings
from .trainer.objectives.reference import isogclr_step
from .trainer.run.build import recipe_named

if TYPE_CHECKING:
    from .pipeline.sources import Sample, Source

_SAMPLES, _WIDTH, _START = 6, 8, Progress(step=0, steps_per_epoch=10)


def check_objective(name: str, mode: str = "unimodal", **settings: Any) -> None:
    """Check an objective, `module:name`, with these settings.

    Its loss is finite, and finite gradients reach the features; its state has the rows of the batch, in their order,
    and can be given to the next step; the same random numbers give the same result, and samples in another order, or
    shared among ranks, the same loss. With `takes_weights`, weights multiply the samples' terms of the loss.
    """
    objective = create_objective(name, mode, **settings).double()
    first, second = _features(objective).requires_grad_(), _features(objective).requires_grad_()
    state = _unseen(objective)
    outcome = _step(objective, first, second, state)
    _holds(outcome.loss.isfinite(), f"{name}: the loss is {outcome.loss.item()}")
    for gradient in torch.autograd.grad(outcome.loss, [first, second], allow_unused=True):
        reaches = gradient is not None and gradient.isfinite().all() and gradient.any()
        _holds(reaches, f"{name}: the gradient of the features is zero or not finite")
    _holds(outcome.state.keys() == state.keys(), f"{name}: state {sorted(outcome.state)}, fields {sorted(state)}")
    for field, values in outcome.state.items():
        _holds(values.shape == (_SAMPLES,), f"{name}: state {field} is {list(values.shape)}, not [{_SAMPLES}]")
        _holds(not values.requires_grad, f"{name}: state {field} has a gradient; detach it")
        _holds(values.isfinite().all(), f"{name}: state {field} is not finite after a visit: {values.tolist()}")
    _same(name, "the same step again", _step(objective, first, second, state), outcome)
    turned = torch.arange(_SAMPLES).roll(1)
    moved = _step(objective, first[turned], second[turned], {field: old[turned] for field, old in state.items()})
    expected = {field: values[turned] for field, values in outcome.state.items()}
    _same(name, "samples in another order", moved, Outcome(outcome.loss, expected, {}))
    _step(objective, first, second, outcome.state)
    if objective.takes_weights:
        _check_weights(name, objective, first, second, state, outcome)
    if type(objective).step is Objective.step and not objective.is_whole:
        _check_shares(name, objective, first.detach(), second.detach(), state)


def check_temperature(name: str, mode: str = "unimodal", **settings: Any) -> None:
    """Check a class derived from `thermopile.IndividualTemperature`, `module:name`, with these settings.

    As `check_objective`; and with whatever temperatures it has, loss, gradients and log s are those that iSogCLR's
    equations give (`trainer/objectives/reference.py`, without eps), in three steps; its temperatures stay within
    tau_min and tau_max.
    """
    check_objective(name, mode, **settings)
    objective = create_objective(name, mode, **settings).double()
    _holds(isinstance(objective, IndividualTemperature), f"{name} is not derived from IndividualTemperature")
    given: Any = objective.settings
    shared = {key: getattr(given, key) for key in ("gamma", "rho", "tau_min", "tau_max", "tau_init")}
    reference = IsogclrSettings(eta=0.0, **shared)
    state = _unseen(objective)
    for number in range(3):
        torch.manual_seed(number)
        first, second = (_features(objective).requires_grad_() for _ in range(2))
        rows = {f"{side}/{key}": state[f"{side}/{key}"].clone() for side in objective.sides for key in ("log_s", "tau")}
        rows |= {f"{side}/u": torch.zeros(_SAMPLES, dtype=torch.float64) for side in objective.sides}
        outcome = _step(objective, first, second, state)
        loss = isogclr_step(first, second, torch.arange(_SAMPLES), rows, reference)
        found, expected = (torch.autograd.grad(value, [first, second]) for value in (outcome.loss, loss))
        log_s = {field: values for field, values in outcome.state.items() if field.endswith("/log_s")}
        gradients = [{f"gradient {view}": values for view, values in enumerate(each)} for each in (found, expected)]
        parts = Outcome(outcome.loss, log_s | gradients[0], {}), Outcome(loss, rows | gradients[1], {})
        _same(name, f"step {number + 1}", *parts)
        for field, tau in outcome.state.items():
            is_inside = not field.endswith("/tau") or bool(((tau >= given.tau_min) & (tau <= given.tau_max)).all())
            _holds(is_inside, f"{name}: step {number + 1}, {field} leaves tau_min … tau_max: {tau.tolist()}")
        state = outcome.state | {"visits": state["visits"].long().add(1).to(torch.uint32)}


def _check_weights(
    name: str, objective: Objective, first: Tensor, second: Tensor, state: dict[str, Tensor], unweighted: Outcome
) -> None:
    """Check that the loss is a mean of samples' terms, which weights multiply, and that they leave the state alone."""
    weights = _SAMPLES * torch.eye(_SAMPLES, dtype=torch.float64)
    of_each = [_step(objective, first, second, state | {WEIGHT: row}) for row in weights]
    losses = torch.stack([outcome.loss for outcome in of_each])
    _holds(losses.std() > 0, f"{name}: takes_weights, but weights change nothing")
    _same(name, "every sample in turn has all the weight", Outcome(losses.mean(), of_each[0].state, {}), unweighted)


def _check_shares(name: str, objective: Objective, first: Tensor, second: Tensor, state: dict[str, Tensor]) -> None:
    """Check that two ranks with a third and two thirds of the rows have the loss and the state of one with all."""
    third = _SAMPLES // 3
    found = []
    for own in (slice(0, third), slice(third, _SAMPLES), slice(0, _SAMPLES)):
        torch.manual_seed(0)
        rows = {field: values[own] for field, values in state.items()}
        found.append(objective.loss(first, second, own, rows, _START))
    low, high, whole = found
    joined = {field: torch.cat([low.state[field], high.state[field]]) for field in objective.fields}
    expected = Outcome(whole.loss, {field: whole.state[field] for field in objective.fields}, {})
    _same(name, "`own` is a part of the rows", Outcome((low.loss + 2 * high.loss) / 3, joined, {}), expected)


def _features(objective: Objective) -> Tensor:
    values = torch.randn(_SAMPLES, _WIDTH, dtype=torch.float64)
    return F.normalize(values, dim=1) if objective.unit_norm else values


def _unseen(objective: Objective) -> dict[str, Tensor]:
    state = {field: torch.full((_SAMPLES,), value, dtype=torch.float64) for field, value in objective.fields.items()}
    return state | ({"visits": torch.zeros(_SAMPLES, dtype=torch.uint32)} if state else {})


def _step(objective: Objective, first: Tensor, second: Tensor, state: Mapping[str, Tensor]) -> Outcome:
    torch.manual_seed(0)
    outcome: Outcome = objective(first, second, state, _START)
    return outcome


def _same(name: str, what: str, found: Outcome, expected: Outcome) -> None:
    """Compare losses and states, but for the last bits."""
    pairs = {"loss": (found.loss, expected.loss)} | {
        f"state {field}": (values, expected.state[field]) for field, values in found.state.items()
    }
    for part, (one, other) in pairs.items():
        close = torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-9)
        _holds(close, f"{name}: {what}, and {part} is {one.tolist()} instead of {other.tolist()}")


def check_image_encoder(name: str, image_size: int = 64, **config: Any) -> None:
    """Check an image encoder, `module:name`, with these settings: as `check_text_encoder` does."""
    _check_encoder("image", name, image_size, torch.rand(3, 3, image_size, image_size), config)


def check_text_encoder(
    name: str, vocab_size: int = 300, context_length: int = 16, end_id: int = 2, **config: Any
) -> None:
    """Check a text encoder, `module:name`, with these settings.

    Its features are finite and of its width; the seed gives the weights; a sample's features do not depend on the
    others in evaluation mode; every weight that is to be trained gets a gradient.
    """
    tokenizer = TokenizerInfo(vocab_size=vocab_size, context_length=context_length, end_id=end_id)
    tokens = torch.randint(end_id + 1, vocab_size, (3, context_length), dtype=torch.int32)
    tokens[:, -1] = end_id
    _check_encoder("text", name, tokenizer, tokens, config)


def _check_encoder(side: str, name: str, given: int | TokenizerInfo, inputs: Tensor, config: dict[str, Any]) -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(own_backbone(side, EncoderConfig(name=name, config=config), False, given))
    encoder, again = made
    for key, value in encoder.state_dict().items():
        _holds(torch.equal(value, again.state_dict()[key]), f"{name}: {key} differs between two with the same seed")
    features = encoder(inputs)
    _holds(features.shape == (3, encoder.width), f"{name}: features are {list(features.shape)}")
    features.square().sum().backward()
    idle = [key for key, weight in encoder.named_parameters() if weight.requires_grad and weight.grad is None]
    _holds(not idle, f"{name}: no gradient reaches {', '.join(idle)}; several ranks would wait for it")
    with torch.inference_mode():
        together = encoder.eval()(inputs)
        alone = torch.cat([encoder(row[None]) for row in inputs])
    _holds(torch.allclose(together, alone, rtol=1e-3, atol=1e-5), f"{name}: a sample's features depend on the others")


def check_recipe(name: str, **fields: Any) -> None:
    """Check a recipe, `module:name`, with these fields changed: it is a `thermopile.Recipe`, its values in range."""
    from .trainer.config import RecipeConfig

    recipe_named(RecipeConfig(name=name, **fields))


def check_source(source: Source) -> None:
    """Check a source: what its samples and listing are, and that a worker process can be given it.

    Reads every sample twice, so give it a small listing.
    """
    _holds(len(source) > 0, "the source has no samples")
    copy = pickle.loads(pickle.dumps(source))  # as a worker process gets it
    ids = range(len(source))
    for i in ids:
        sample, again = source[i], copy[i]
        for what, text in {"uri": sample.uri, "key": sample.key}.items():
            _holds(isinstance(text, str) and text.isprintable(), f"sample {i}: {what} {text!r} is not printable text")
        told = source.uri(i), source.key(i)
        _holds((sample.uri, sample.key) == told, f"sample {i}: uri() or key() says otherwise")
        _holds((sample.caption is not None) == (source.mode == "pairs"), f"sample {i}: caption {sample.caption!r}")
        _holds(_comparable(sample) == _comparable(again), f"sample {i} is another one when it is read again")
    keys = {source.key(i) for i in ids}
    _holds(len(keys) == len(source), f"{len(source) - len(keys)} keys occur more than once")
    if (groups := source.groups()) is not None:
        _holds(groups.of_sample.shape == (len(source),), f"groups: of_sample is {groups.of_sample.shape}")
        _holds(groups.of_sample.dtype == np.int32, f"groups: of_sample is {groups.of_sample.dtype}, not int32")
        named = [groups.names[code] or None for code in groups.of_sample]
        wrong = [i for i in ids if source[i].group != named[i]]
        _holds(not wrong, f"groups: samples {wrong[:5]} have another group when they are read")
    texts = list(source.captions(np.arange(len(source))))
    _holds(bool(texts) == (source.mode == "pairs"), f"captions() yields {len(texts)}, but the mode is {source.mode}")
    json.dumps(source.describe(), allow_nan=False)


def _comparable(sample: Sample) -> tuple[Any, ...]:
    picture = sample.picture if isinstance(sample.picture, bytes) else np.asarray(sample.picture).tobytes()
    return (*sample._replace(picture=picture),)


def _holds(condition: object, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)
