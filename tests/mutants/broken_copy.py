"""A copy of the tree in which code is broken and tests run: the checkout itself is never touched, even by Ctrl-C."""

import importlib
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, as in tests/conftest.py
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two mutants of equal length, made in one second, would share bytecode

CHECKOUT = Path(__file__).parents[2]
READ_AHEAD = ("numba", "torch", "pandas", "pyarrow.parquet", "pydantic", "zarr", "icechunk")
"""Imported once: each run of the tests is a fork of this process, so that a mutant costs little more than its tests."""
MEMORY_BYTES = 12 << 30
"""Address space of a run: a mutant may allocate without end."""
SPARE_SECONDS = 15


class Run(NamedTuple):
    """A run of tests."""

    passed: bool
    ran: bool
    """Whether any test began: else the code could not even be imported."""
    failed: list[str]
    ended: str
    seconds: float
    output: str

    def __str__(self) -> str:
        return ", ".join(self.failed) or self.ended


class BrokenCopy:
    """The checkout as it is, with files that are not committed yet, in a temporary directory."""

    def __init__(self, root: Path) -> None:
        self._root, self._runs = root / "thermopile", root / "run"
        for name in READ_AHEAD:
            importlib.import_module(name)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=CHECKOUT, text=True).split("\0")[:-1]:
            if (CHECKOUT / name).is_file():  # else it was deleted
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(CHECKOUT / name, self._root / name, follow_symlinks=False)
        (self._root / "build/types").mkdir(parents=True)
        (self._root / "build/types/thermopile").symlink_to("../..")

    def path(self, name: str) -> Path:
        return self._root / name

    @contextmanager
    def with_code(self, name: str, code: str) -> Iterator[None]:
        file = self.path(name)
        whole = file.read_bytes()
        file.write_text(code)
        try:
            yield
        finally:
            file.write_bytes(whole)

    def run(self, tests: Sequence[str], limit: float | None = None, *, to_the_end: bool = False) -> Run:
        """Run those tests in these files and folders that `make test` runs, for at most `limit` seconds."""
        shutil.rmtree(self._runs, ignore_errors=True)
        self._runs.mkdir()
        started = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=self._test, args=(tests, to_the_end))
        process.start()
        try:
            process.join(limit)
            took, is_late = time.monotonic() - started, process.exitcode is None
        finally:
            with suppress(ProcessLookupError):  # what is left of it, as fork servers, also after Ctrl-C
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        said = (self._runs / "output").read_text(errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", said, re.MULTILINE)  # without parameters
        ended = f"the limit of {limit:.0f} s" if is_late else f"exit code {process.exitcode}"
        ran = process.exitcode <= 0 or any("::" in each for each in failed)
        return Run(process.exitcode == 0, ran, list(dict.fromkeys(failed)), ended, took, said)

    def run_unbroken(self, tests: Sequence[str]) -> float:
        """Return the limit for each mutant's run of these tests, which must pass while nothing is broken."""
        run = self.run(tests, to_the_end=True)
        if not run.passed:
            raise SystemExit(f"Nothing is broken yet, but tests fail: {run}\n{run.output}")
        print(f"  unbroken: {run.seconds:.0f} s", flush=True)
        return SPARE_SECONDS + 3 * run.seconds

    def _test(self, tests: Sequence[str], to_the_end: bool) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        output = os.open(self._runs / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self._root)
        os.environ["PYTHONPATH"] = types = str(self._root / "build/types")
        os.environ["NUMBA_CACHE_DIR"] = str(self._root.parent / "numba")
        sys.path.insert(0, types)
        sys.modules["__main__"] = ModuleType("__main__")  # processes that a test starts would import this program

        import pytest

        options = ["--rootdir=tests", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not soak and not wide",
                   "-W", "ignore::pytest.PytestAssertRewriteWarning",  # zarr, read ahead, is a plugin as well
                   f"--basetemp={self._runs / 'tmp'}"]  # fmt: skip
        code = pytest.main([*options, *["-x"][to_the_end:], *(f"tests/{each}" for each in tests)])
        sys.stdout.flush()
        os._exit(code)


@contextmanager
def broken_copy() -> Iterator[BrokenCopy]:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that nothing is left either
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as directory:
        yield BrokenCopy(Path(directory))
