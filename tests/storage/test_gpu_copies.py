"""Copies beside the computation, against a model of a GPU: streams that run in any order that their events allow.

Every stream is a queue. What is at the head of one runs as soon as the events that it waits for are done, in an order
that chance decides, while the program goes on. Freed memory is handed out again as torch and DALI do. A reader that
sees anything but what was written for it has found a race.
"""

import random
from collections import deque
from functools import partial

import pytest
import torch

from thermopile.pipeline.loading.dali_loader import copy_outputs
from thermopile.storage.gpu_copies import Arriving, Copies, Pace


class RaceError(AssertionError):
    """A reader saw memory that was overwritten, or not yet filled."""


class Stream:
    def __init__(self):
        self.queue = deque()
        self.free = []  # (block, events after which its memory may be used again)


class Block:
    """Device memory; `rows` holds what each row contains."""

    def __init__(self, rows):
        self.rows = rows


class Event:
    def __init__(self, gpu):
        self.gpu, self.done = gpu, False

    def synchronize(self):
        while not self.done:
            assert self.gpu.advance(), "the streams wait for each other"


class DeviceTensor:
    """Owns a block until nothing refers to it, as a tensor does."""

    def __init__(self, gpu, block, stream):
        self.gpu, self.block, self.stream, self.kept = gpu, block, stream, set()

    @property
    def shape(self):
        return (len(self.block.rows),)

    def __iter__(self):
        return (Row(self, place) for place in range(len(self.block.rows)))

    def __del__(self):
        self.stream.free.append((self.block, [self.gpu.end_of(stream) for stream in self.kept]))


class Row:
    def __init__(self, tensor, place):
        self.tensor, self.place = tensor, place


class HostTensor:
    """Pinned memory. A queued copy holds it, as torch's allocator does."""

    dtype = torch.float32

    def __init__(self, rows):
        self.rows = list(rows)

    @property
    def shape(self):
        return (len(self.rows),)


class GPU:
    """A device for `Copies`: the caller's stream, and any others."""

    def __init__(self, seed):
        self.chance, self.streams = random.Random(seed), []
        self.caller = self.new_stream()

    def new_stream(self):
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self):
        return self.caller

    def empty(self, shape, dtype, stream):
        for place, (block, events) in enumerate(stream.free):
            if len(block.rows) == shape[0] and all(event.done for event in events):
                del stream.free[place]
                return DeviceTensor(self, block, stream)
        return DeviceTensor(self, Block([None] * shape[0]), stream)

    def copy(self, target, source, stream):
        to, source_memory = memory(target), memory(source)

        def run():
            to[0][to[1]] = source_memory[0][source_memory[1]]

        self.launch(stream, run)

    def record(self, stream):
        event = Event(self)
        self.launch(stream, lambda: setattr(event, "done", True))
        return event

    def end_of(self, stream):
        """As `record`, but nothing runs meanwhile: an error that a reader raised in a destructor would be lost."""
        event = Event(self)
        stream.queue.append(lambda: setattr(event, "done", True))
        return event

    def wait(self, stream, event):
        stream.queue.append(event)

    def keep(self, tensor, stream):
        tensor.kept.add(stream)

    def launch(self, stream, run):
        stream.queue.append(run)
        for _ in range(self.chance.randrange(4)):
            self.advance()

    def advance(self):
        """Run what is at the head of one of the streams that can go on; return whether there is one."""
        ready = [stream for stream in self.streams
                 if stream.queue and (callable(stream.queue[0]) or stream.queue[0].done)]  # fmt: skip
        if not ready:
            return False
        head = self.chance.choice(ready).queue.popleft()
        if callable(head):
            head()
        return True

    def fill(self, tensor, rows, stream):
        block = tensor.block
        self.launch(stream, lambda: block.rows.__setitem__(slice(None), rows))

    def read(self, tensor, expected, stream):
        block = tensor.block

        def run():
            if block.rows != expected:
                raise RaceError(f"a reader expected {expected} and saw {block.rows}")

        self.launch(stream, run)


def memory(side):
    """Return a list and the index or slice of it that a tensor or a row of one stands for."""
    if isinstance(side, Row):
        return side.tensor.block.rows, side.place
    if isinstance(side, DeviceTensor):
        return side.block.rows, slice(None)
    return (side.rows, 0) if len(side.rows) == 1 else (side.rows, slice(None))


def train_steps(gpu, steps=6):
    """Steps of a training, each with state that comes and new state that goes."""
    copies = Copies(gpu)
    arriving, leaving = copies.upload([HostTensor(["state 0", "state 0"])]), deque()
    for step in range(steps):
        (state,) = arriving.here()
        arriving = copies.upload([HostTensor([f"state {step + 1}"] * 2)])
        gpu.read(state, [f"state {step}"] * 2, gpu.caller)
        fields = [gpu.empty((1,), None, gpu.caller) for _ in range(2)]
        for field in fields:
            gpu.fill(field, [f"new {step}"], gpu.caller)
        host = HostTensor([None, None])
        leaving.append((copies.download([Row(field, 0) for field in fields], host), host, step))
        for field in fields:  # the caller may change them at once
            gpu.fill(field, ["changed"], gpu.caller)
        del state, fields, field
        if len(leaving) > 2 or step == steps - 1:
            copied, host, of_step = leaving.popleft()
            copied.synchronize()
            assert host.rows == [f"new {of_step}"] * 2
    while gpu.advance():
        pass


class NoWaiting(GPU):
    def wait(self, stream, event):
        pass


class NoKeeping(GPU):
    def keep(self, tensor, stream):
        pass


def in_many_orders(scenario, gpu=GPU, first_seed=0, orders=300):
    for seed in range(first_seed, first_seed + orders):
        scenario(gpu(seed))


A_MILLION = [pytest.param(seed, 100_000, marks=pytest.mark.soak) for seed in range(300, 1_000_300, 100_000)]


@pytest.mark.parametrize(("first_seed", "orders"), [(0, 300), *A_MILLION])
def test_state_arrives_and_leaves_whole_in_any_order_that_the_streams_run(first_seed, orders):
    in_many_orders(train_steps, GPU, first_seed, orders)


@pytest.mark.parametrize("careless", [NoWaiting, NoKeeping])
def test_the_model_finds_copies_that_do_not_wait_or_keep_no_memory(careless):
    with pytest.raises(AssertionError):
        in_many_orders(train_steps, careless)


class SlowGPU(GPU):
    """Runs nothing before somebody waits for it."""

    def launch(self, stream, run):
        stream.queue.append(run)


def blocks_of(gpu, steps, end_step):
    """Return the blocks of device memory for the views of this many steps, each uploaded for its own step."""
    copies, views_memory = Copies(gpu), set()
    for step in range(steps):
        pixels = [f"views {step}"] * 2
        (views,) = copies.upload([HostTensor(pixels)]).here()
        views_memory.add(views.block)
        gpu.read(views, pixels, gpu.caller)
        del views
        end_step()
    while gpu.advance():
        pass
    return views_memory


def test_a_host_two_steps_ahead_takes_memory_for_three_batches_however_many_steps_there_are():
    paced, free = SlowGPU(0), SlowGPU(0)
    assert len(blocks_of(paced, 50, Pace(paced).end_step)) == 3
    assert len(blocks_of(free, 50, lambda: None)) == 50


class DALI:
    """A pipeline on a stream and in memory of its own, which it reuses at once, in the order of its stream."""

    def __init__(self, gpu):
        self.gpu, self.stream, self.runs, self.scheduled = gpu, gpu.new_stream(), 0, deque()

    def schedule_run(self):
        output = self.gpu.empty((1,), None, self.stream)
        self.gpu.fill(output, [f"views {self.runs}"], self.stream)
        self.scheduled.append(Output(output, self.gpu.record(self.stream)))
        self.runs += 1

    def share_outputs(self, cuda_stream):
        output = self.scheduled.popleft()
        self.gpu.wait(cuda_stream, output.filled)
        return [output]


class Output:
    def __init__(self, tensor, filled):
        self.tensor, self.filled = tensor, filled

    def as_tensor(self):
        return self


def shared(output, stream):
    """As __dlpack__ with a stream, which waits for the run that made the output."""
    output.tensor.gpu.wait(stream, output.filled)
    return output.tensor


def by_copying(gpu, dali, copies):
    return list(copy_outputs(dali.share_outputs(copies.stream), copies, shared).here())


def by_sharing_memory(gpu, dali, copies):
    return [output.tensor for output in dali.share_outputs(gpu.caller)]


def train_on_views(gpu, take_views, steps=8, ahead=2):
    """Forward and backward passes that read the views, while the pipeline works on later batches."""
    dali, copies = DALI(gpu), Copies(gpu)
    for _ in range(ahead):
        dali.schedule_run()
    for step in range(steps):
        dali.schedule_run()
        views = take_views(gpu, dali, copies)
        for _ in ("forward", "weight gradient of the first layer"):
            for view in views:
                gpu.read(view, [f"views {step}"], gpu.caller)
    while gpu.advance():
        pass


@pytest.mark.parametrize(("first_seed", "orders"), [(0, 300), *A_MILLION])
def test_views_stay_until_the_backward_pass_has_read_them(first_seed, orders):
    in_many_orders(partial(train_on_views, take_views=by_copying), GPU, first_seed, orders)


def test_the_model_finds_the_race_of_views_that_lie_in_dali_s_memory():
    with pytest.raises(RaceError):
        in_many_orders(partial(train_on_views, take_views=by_sharing_memory))


def test_the_model_finds_the_race_of_outputs_that_are_dropped_before_their_copy_has_ended(monkeypatch):
    monkeypatch.setattr(Arriving, "wait", lambda arriving: None)
    with pytest.raises(RaceError):
        in_many_orders(partial(train_on_views, take_views=by_copying))


def test_a_copy_waits_for_no_later_run_of_the_pipeline():
    gpu = GPU(0)
    dali, copies = DALI(gpu), Copies(gpu)
    dali.schedule_run()
    gpu.wait(dali.stream, Event(gpu))  # later runs hang
    dali.schedule_run()
    (views,) = by_copying(gpu, dali, copies)
    assert views.block.rows == ["views 0"]
