"""The parts of a step add up, and each is counted once."""

import pytest
import torch

from thermopile.trainer.metrics import step_clock
from thermopile.trainer.metrics.step_clock import StepClock

CPU = torch.device("cpu")


@pytest.fixture
def passing(monkeypatch):
    """Return a function that advances the clock by some seconds."""
    now = [100.0]
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: now[0])

    def passing(seconds):
        now[0] += seconds

    return passing


def test_a_steps_parts_and_its_whole_are_measured_in_seconds(passing):
    clock = StepClock(CPU)
    with clock.waiting("data_wait"):
        passing(1)
    for _ in range(2):
        with clock.computing("forward_backward"):
            passing(2)
    with clock.computing("optimizer"):
        passing(3)
    passing(0.5)
    assert clock.end_step() == {
        "step_seconds": 8.5, "data_wait_seconds": 1, "store_wait_seconds": 0, "forward_backward_seconds": 4,
        "optimizer_seconds": 3, "communication_seconds": 0,
    }  # fmt: skip


def test_the_next_step_begins_where_the_last_one_ended(passing):
    clock = StepClock(CPU)
    with clock.waiting("store_wait"):
        passing(1)
    clock.end_step()
    passing(0.25)
    assert clock.end_step()["step_seconds"] == 0.25
    assert clock.end_step()["store_wait_seconds"] == 0


def test_communication_within_forward_and_backward_is_not_counted_twice(passing):
    clock = StepClock(CPU)
    with clock.computing("forward_backward"):
        passing(1)
        with clock.computing("communication"):
            passing(2)
        passing(4)
        clock.bucket_ready()
        passing(8)  # more of backprop, beside which the bucket is on its way
        clock.bucket_ready()
        passing(16)
        clock.end_of_backward()
    times = clock.end_step()
    assert times["communication_seconds"] == 2 + 16
    assert times["forward_backward_seconds"] == 1 + 4 + 8


def test_a_wait_that_ends_by_an_error_is_counted(passing):
    clock = StepClock(CPU)

    def lose():
        with clock.waiting("data_wait"):
            passing(1)
            raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        lose()
    assert clock.end_step()["data_wait_seconds"] == 1


@pytest.mark.gpu
def test_the_time_of_a_gpu_is_its_own_and_can_be_asked_for_before_it_is_done():
    clock = StepClock(torch.device("cuda"))
    done = torch.cuda.Event()
    with clock.computing("optimizer"):
        torch.cuda._sleep(2_000_000_000)
    done.record()
    times = clock.end_step()
    assert not done.query()  # of a second's work on the GPU, for which nothing has waited
    assert times["optimizer_seconds"]() > 0.05
