"""Whole epochs through a store, as fast as it goes or with steps of a given length."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import torch

from ....pipeline.order import Order, Window
from ....state_store import StateStore
from ..progress import counted
from .measured import StepSeconds

_PREFETCHED_STEPS = 2


def expected_windows(order: Order) -> Iterator[Window]:
    """The windows of epoch 0, 1 and so on without end, in numbers of puts: 1 is the first step of the first epoch."""
    for epoch in count():
        first_put = epoch * order.steps_per_epoch + 1
        for window in order.windows(epoch):
            yield replace(window, first_step=first_put + window.first_step, last_step=first_put + window.last_step)


def ids_of(order: Order, step: int) -> torch.Tensor:
    """The ids of the step after `step` others, over all epochs; int64 [b]."""
    return torch.from_numpy(order.batch_ids(*divmod(step, order.steps_per_epoch)))


def pass_epoch(title: str, store: StateStore, order: Order, epoch: int, step_ms: float = 0.0) -> list[StepSeconds]:
    """Take and put every batch of an epoch, with rows two steps ahead prefetched, and sleep for `step_ms` between."""
    first = epoch * order.steps_per_epoch
    ahead = [ids_of(order, first + step) for step in range(_PREFETCHED_STEPS)]
    for ids in ahead:
        store.prefetch(ids)
    # Values other than those taken: a sample's initial log_s is -inf, which no step makes.
    state = {name: torch.rand(len(ahead[0])) for name in store.fields}
    took = []
    for step in counted(title, order.steps_per_epoch):
        began = time.perf_counter()
        coming = ids_of(order, first + step + _PREFETCHED_STEPS)
        ids = ahead.pop(0)
        ahead.append(coming)
        called = time.perf_counter()
        store.take(ids)
        store.prefetch(coming)
        waited = time.perf_counter() - called
        time.sleep(step_ms / 1e3)
        called = time.perf_counter()
        store.put(ids, state, step=first + step + 1)
        ended = time.perf_counter()
        took.append(StepSeconds(waited + ended - called, ended - began))
    return took
