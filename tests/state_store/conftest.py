"""A small store of two fields, and batches of new rows for it."""

import logging
import math
import multiprocessing
import threading
from multiprocessing import forkserver

import pytest
import torch

from thermopile.state_store.durable import Repository
from thermopile.state_store.schema import Description
from thermopile.state_store.store import StateStore

from support.commits import BLOCK_ROWS, SAMPLES, SCHEMA

FIELDS = {"image/log_s": -math.inf, "image/tau": 0.05}


@pytest.fixture
def fields():
    return dict(FIELDS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "state"


@pytest.fixture
def repository(path):
    """An empty repository, as `commits` describes it."""
    return Repository.create(path, Description(SAMPLES, SCHEMA, BLOCK_ROWS, "glyphs-1"))


@pytest.fixture
def stores():
    """All stores of a test, which are closed when it ends."""
    opened = []
    yield opened
    for store in opened:
        store.close()


@pytest.fixture
def create(path, stores):
    """Create a store of 100 samples in blocks of 16."""

    def make(path=path, **changes):
        settings = {"samples": 100, "fields": FIELDS, "block_rows": 16, "dataset_fingerprint": "glyphs-1"} | changes
        stores.append(StateStore.create(path, **settings))
        return stores[-1]

    return make


@pytest.fixture
def resume(path, stores):
    """Open the store that `create` made."""

    def make(path=path, **changes):
        settings = {"samples": 100, "fields": FIELDS, "dataset_fingerprint": "glyphs-1"} | changes
        stores.append(StateStore.open(path, **settings))
        return stores[-1]

    return make


@pytest.fixture
def new_rows():
    """Make new state for b samples: every value of a field is `value`, or `value` plus its place in the batch."""

    def make(b, value=1.0, *, spread=False):
        return {name: torch.full((b,), value) + (torch.arange(b) if spread else 0) for name in FIELDS}

    return make


@pytest.fixture
def hold_rows_thread():
    """Stop the thread that writes rows at its next refused row, which it logs, until `let_go` is set."""

    class Gate(logging.Handler):
        def __init__(self):
            super().__init__()
            self.reached, self.let_go = threading.Event(), threading.Event()

        def emit(self, record):
            self.reached.set()
            self.let_go.wait()

    gate = Gate()
    logger = logging.getLogger("thermopile.state_store.transfer")
    logger.addHandler(gate)
    yield gate
    gate.let_go.set()
    logger.removeHandler(gate)


@pytest.fixture(scope="session")
def start():
    """Start `function(connection, *arguments)` in a process of its own; return it and our end of the connection.

    The processes are forks of one server, which imports torch and the store once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "thermopile.state_store.store", "support.programs.long_life"])
    forkserver.ensure_running()  # now, with the variables of no test
    started = []

    def start(function, *arguments):
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(theirs, *arguments))
        process.start()
        theirs.close()
        started.append(process)
        return process, ours

    yield start
    for process in started:
        process.kill()
