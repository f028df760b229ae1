"""The program as processes of their own, without the seconds that its imports and its first batch take."""

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

import pytest

from thermopile.benchmarks.object_server import free_port

OUTPUT_TO_FILES = """
import os, sys
for number, path in ((1, out), (2, errors)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
os.environ.update(environment)
sys.argv = ["thermopile", *arguments]
"""
COMMAND_LINE = """
from thermopile.tools.cli import main
main()
"""


class Program:
    """`thermopile ARGUMENTS` in a process forked from one that has imported everything and has no threads.

    code: Python to run in place of the command line.
    """

    def __init__(self, context, folder: Path, arguments, environment, code) -> None:
        self._out, self._errors = folder / "out", folder / "errors"
        given = {"out": str(self._out), "errors": str(self._errors), "environment": environment}
        given["arguments"] = [*map(str, arguments)]
        self.process = context.Process(target=exec, args=(OUTPUT_TO_FILES + code, given))
        self.process.start()
        self.pid = self.process.pid

    def has_said(self, words: str) -> bool:
        """Whether its stdout has these words."""
        return self._out.exists() and words in self._out.read_text()

    def is_running(self) -> bool:
        return self.process.is_alive()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def end(self, within: float = 300) -> tuple[int, str, str]:
        """Its exit code, negative for a signal, and what it said to stdout and stderr; ends it if it goes on longer."""
        self.process.join(within)
        code = self.process.exitcode
        self.kill()
        self.process.join()
        return code, *(path.read_text() if path.exists() else "" for path in (self._out, self._errors))


@pytest.fixture(scope="session")
def start_program(pairs_dataset, tmp_path_factory: pytest.TempPathFactory):
    """Return a function (*arguments, code=…, **environment) -> Program."""
    context = multiprocessing.get_context("forkserver")
    # The last is for later tests of this process that convert: their workers are forked from the same server.
    preload = [
        "thermopile.trainer.loop",
        "thermopile.tools.cli",
        "support.programs.warm_up",
        "thermopile.pipeline.conversion.preloaded",
    ]
    context.set_forkserver_preload(preload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARM_UP_DATASET", str(pairs_dataset.path))
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the program sets it before it imports torch
        # The conversion of the dataset started a server that has imported much less, and blocks Ctrl-C.
        forkserver._forkserver._stop()
        forkserver.ensure_running()
    folder, programs = tmp_path_factory.mktemp("programs"), []

    def start(*arguments, code=COMMAND_LINE, **environment) -> Program:
        own = folder / str(len(programs))
        own.mkdir()
        environment = {name: str(value) for name, value in environment.items()}
        programs.append(Program(context, own, arguments, environment, code))
        return programs[-1]

    yield start
    for program in programs:  # those of tests that failed; this process would wait for them for ever
        program.kill()


@pytest.fixture(scope="session")
def start_ranks(start_program):
    """Return a function that starts a process for each rank, as torchrun does; but nobody ends those that are left.

    last_rank: arguments of the last rank besides those of all. codes: Python for each rank, instead of the command.
    """

    def start(world, *arguments, last_rank=(), codes=None):
        # On a port of those that clients get, a rank that is early might connect to itself and wait for ever.
        port = free_port()
        shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [
            start_program(
                *arguments, *(last_rank if rank == world - 1 else ()), code=codes[rank] if codes else COMMAND_LINE,
                **shared, RANK=rank, LOCAL_RANK=rank,
            ) for rank in range(world)
        ]  # fmt: skip

    return start
