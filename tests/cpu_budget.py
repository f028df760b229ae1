"""Count the CPU seconds of a command and of all that it starts, and fail above a budget.

    python tests/cpu_budget.py [--budget SECONDS] [--budget-a-file SECONDS] COMMAND …

CPU seconds depend on what else the machine does far less than wall time does, but on the machine itself by a factor of
two, and on one that others share by the same factor from one minute to the next: so a fixed loop is timed every few
seconds while the command runs, and the budget grows with the CPU time that the loop takes.
`time` misses fork servers, which outlive the process that started them: this process adopts and reaps whatever is
orphaned below it. Inside pytest, where this file is a plugin, it says which test files cost most.
"""

import argparse
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

SECONDS = 850
"""What `make test` may take besides lint, where the loop takes LOOP_SECONDS. One such machine took 610 to 735."""
LOOPS, LOOP_SECONDS, EVERY_SECONDS = 200_000, 0.015, 5
SECONDS_A_FILE = 25
KERNELS = "kernels, compiled once on a machine"
SHOWN = 20
ORPHANS_SECONDS = 5
LIMITS = "CPU_BUDGET_A_FILE"
"""The environment variable that tells the plugin to count, with the seconds that a file may take."""
SET_CHILD_SUBREAPER = 36  # linux/prctl.h
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=SECONDS)
    parser.add_argument("--budget-a-file", type=float, default=SECONDS_A_FILE)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, lambda *_: None)  # it is the command's; unlike SIG_IGN, a handler is not inherited
    command = subprocess.Popen(given.command, env=os.environ | {LIMITS: str(given.budget_a_file)})
    slowness = Slowness()
    code = reaped(command.pid)
    seconds, allowed = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]), given.budget * slowness.mean
    print(f"{seconds:.0f} CPU seconds, of {allowed:.0f} allowed on a machine as fast as this one")
    if code == 0 and seconds > allowed:
        print("Too many: make the files above cheaper, or mark what need not run before each commit as wide.")
        return 1
    return code


class Slowness:
    """Times the fixed loop in CPU seconds every few seconds, in a thread."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._measure, daemon=True)
        self._thread.start()

    @property
    def mean(self) -> float:
        """In LOOP_SECONDS."""
        return sum(self._times) / len(self._times) / LOOP_SECONDS if self._times else 1.0

    def _measure(self) -> None:
        while True:
            before = time.thread_time()
            sum(i * i & 7 for i in range(LOOPS))
            self._times.append(time.thread_time() - before)
            time.sleep(EVERY_SECONDS)


def reaped(pid: int) -> int:
    """Wait until this child and every orphan have ended, and return the child's exit code.

    Orphans that outlive it by ORPHANS_SECONDS are killed: multiprocessing's tracker of a process that was killed may
    wait for a minute or more until the kernel closes a pipe that nobody holds any more.
    """
    code = 1
    signal.signal(signal.SIGALRM, kill_children)
    with suppress(ChildProcessError):  # no child is left
        while True:
            ended, status = os.wait()
            if ended == pid:
                code = os.waitstatus_to_exitcode(status)
                signal.setitimer(signal.ITIMER_REAL, ORPHANS_SECONDS, 1)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return code


def kill_children(*_: object) -> None:
    with suppress(OSError):
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)


def tree_seconds() -> float:
    """Return the CPU seconds of this process and its descendants, of ended ones too."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    tree = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return sum(ticks.get(pid, 0) for pid in tree) / TICKS_A_SECOND


class Spent:
    """The CPU seconds of one process of pytest by their cause: a file, or a fixture of the session."""

    def __init__(self, slowness: "Slowness | None") -> None:
        self.slowness = slowness
        self.by_cause: Counter[str] = Counter()
        self.cause, self._before = "imports and collection", 0.0

    def begin(self, cause: str) -> str:
        """Charge what comes next to this cause; return the one before it."""
        if cause != self.cause:
            now = tree_seconds()
            self.by_cause[self.cause] += max(0, now - self._before)
            self._before = now
        before, self.cause = self.cause, cause
        return before

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Charge compiled kernels to no file: on a clean machine, the first that needs one would pay for all."""
        if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
            return
        from numba.core import event

        spent = self

        class Compiling(event.Listener):
            """In any thread, as loaders compile in their own; one compilation may be within another."""

            depth, outside = 0, ""

            def on_start(self, event: object) -> None:
                if not self.depth:
                    self.outside = spent.begin(KERNELS)
                self.depth += 1

            def on_end(self, event: object) -> None:
                self.depth -= 1
                if not self.depth and spent.cause == KERNELS:
                    spent.begin(self.outside)

        event.register("numba:compile", Compiling())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self.begin(item.nodeid.partition("::")[0])
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef):
        if fixturedef.scope != "session":
            return (yield)
        before = self.begin(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.begin(before)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not session.config.getoption("numprocesses", None):
            self.begin("")
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = dict(self.by_cause)
            return
        limit, slowness = float(os.environ[LIMITS]), self.slowness.mean if self.slowness else 1.0
        files = {cause: spent / slowness for cause, spent in self.by_cause.items() if cause.endswith(".py")}
        self.too_dear = [file for file, spent in files.items() if spent > limit]
        if self.too_dear and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_testnodedown(self, node) -> None:
        self.by_cause.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.section(f"{SHOWN} dearest of {sum(self.by_cause.values()):.0f} CPU seconds")
        for cause, seconds in self.by_cause.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:6.1f}  {cause}{'  TOO DEAR' if cause in self.too_dear else ''}")


def pytest_configure(config: pytest.Config) -> None:
    if LIMITS in os.environ:
        config.pluginmanager.register(Spent(None if hasattr(config, "workerinput") else Slowness()), "spent")


if __name__ == "__main__":
    sys.exit(main())
