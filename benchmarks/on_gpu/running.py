"""Run each part in a process of its own, within its time, and tell how it went."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .findings import file_of, read
from .parts import PACKAGES, Part

NO_TIME = "not run: no time was left"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""Nothing here may ask the network."""


@dataclass(frozen=True)
class Outcome:
    """How a part went."""

    part: Part
    seconds: float
    problem: str
    """Why it did not run or did not end; empty if it ran."""
    found: dict[str, Any] = field(default_factory=dict)
    """As Findings writes it, also of a part that was ended."""


class Runner:
    """Runs parts one after the other until the time of all is over."""

    def __init__(self, command: Sequence[str], folder: Path, seconds: float) -> None:
        """command: runs the part whose name follows it and `--worker`. folder: where parts write what they find."""
        self._command, self._folder, self._ends = command, folder, time.monotonic() + seconds
        self.outcomes: list[Outcome] = []

    def run(self, part: Part) -> None:
        """Run a part, or note why it cannot run."""
        print(f"{part.name}: ", end="", flush=True)
        problem, began = "interrupted", time.monotonic()
        try:
            problem = self._refusal(part) or self._run(part, min(part.seconds, self._ends - began))
        finally:
            seconds = time.monotonic() - began
            self.outcomes.append(Outcome(part, seconds, problem, read(part.name, self._folder)))
            print(problem or f"{seconds:.0f} s", flush=True)

    def take_over(self, outcome: Outcome) -> None:
        """Count a part that ran earlier among those of this run; later parts can read what it found."""
        file_of(outcome.part.name, self._folder).write_text(json.dumps(outcome.found), "utf-8")
        self.outcomes.append(outcome)

    @property
    def held(self) -> bool:
        """Whether all parts that there was time for ran to their end, and no figure missed its target."""
        return not self._missed() and all(outcome.problem in ("", NO_TIME) for outcome in self.outcomes)

    def complaints(self) -> list[str]:
        """Return a line for each figure that missed its target, and one for the parts that did not run."""
        lines = [f"missed: {check['what']}: {check['found']}, asked {check['asked']}" for check in self._missed()]
        problems: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            problems.setdefault(outcome.problem, []).append(outcome.part.name)
        return lines + [f"{', '.join(names)}: {problem}" for problem, names in problems.items() if problem]

    def _missed(self) -> list[dict[str, Any]]:
        checks = (check for outcome in self.outcomes for check in outcome.found.get("checks", []))
        return [check for check in checks if not check["held"]]

    def _refusal(self, part: Part) -> str:
        if lacking := missing(part.needs):
            return f"not run: {', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing"
        return "" if time.monotonic() + part.usual <= self._ends else NO_TIME

    def _run(self, part: Part, seconds: float) -> str:
        log = self._folder / f"{part.name}.log"
        with log.open("wb") as output:
            # A session of its own, so that nothing that the part has started outlives it.
            process = subprocess.Popen([*self._command, "--worker", part.name], stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=output, start_new_session=True, env=os.environ | OFFLINE)  # fmt: skip
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return f"ended after {seconds:.0f} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code == 0:
            return ""
        if code < 0:
            return f"failed: killed by signal {-code}, possibly out of memory"
        lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        return f"failed: {lines[-1].strip()[:300] if lines else f'exit code {code}'}"


def missing(modules: Iterable[str]) -> list[str]:
    """Return the packages of those modules that are not installed."""
    return [PACKAGES.get(module, module) for module in modules if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False
