"""A training step with the real encoders, objective and optimiser, on random pictures and captions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ....pipeline.batch import Batch
from ....pipeline.dataset_index import TokenizerInfo
from ....pipeline.order import Order
from ....trainer.config import ModelConfig, OptimizerConfig
from ....trainer.encoders import Encoders, with_names
from ....trainer.objectives import Progress, create_objective
from ....trainer.optim import create_optimizer
from .epochs import ids_of
from .measured import StepSeconds

_IMAGE_SIZE = 32
_TOKENIZER = TokenizerInfo(vocab_size=1024, context_length=32, end_id=3)


class State(Protocol):
    """What a step reads and renews: the store, or an alternative."""

    def prefetch(self, sample_ids: Tensor) -> None: ...
    def take(self, sample_ids: Tensor) -> dict[str, Tensor]: ...
    def put(self, sample_ids: Tensor, state: Mapping[str, Tensor], *, step: int) -> None: ...


class TrainingLoop:
    """Steps of isogclr on pairs: convolutions for the pictures, 32 pixels wide, token embeddings for the captions.

    A step does what the trainer's does, but for the loader and the log.
    """

    def __init__(self, state: State, order: Order, steps_done: int = 0) -> None:
        torch.manual_seed(0)
        self._state, self._order, self.steps_done = state, order, steps_done
        self._encoders = Encoders.create(with_names(ModelConfig()), "bimodal", _IMAGE_SIZE, _TOKENIZER)
        self._objective = create_objective("isogclr", "bimodal")
        self._optimizer: Any = create_optimizer(OptimizerConfig(), self._encoders, self._objective)
        self._pictures = torch.rand(order.batch_size, 3, _IMAGE_SIZE, _IMAGE_SIZE)
        self._tokens = torch.randint(_TOKENIZER.vocab_size, (order.batch_size, _TOKENIZER.context_length))

    def step(self) -> StepSeconds:
        ids, coming = ids_of(self._order, self.steps_done), ids_of(self._order, self.steps_done + 1)
        began = time.perf_counter()
        rows = self._state.take(ids)
        self._state.prefetch(coming)
        taken = time.perf_counter()

        first, second = self._encoders(Batch(ids, (self._pictures,), self._tokens))
        outcome = self._objective(first, second, rows, Progress(self.steps_done, self._order.steps_per_epoch))

        putting = time.perf_counter()
        self._state.put(ids, outcome.state, step=self.steps_done + 1)
        put = time.perf_counter()

        self._optimizer.zero_grad(set_to_none=True)
        outcome.loss.backward()
        self._optimizer.step()
        self.steps_done += 1
        return StepSeconds(store=taken - began + put - putting, whole=time.perf_counter() - began)
