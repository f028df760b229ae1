"""Measure what this package does on a GPU, and write a page: `make gpu`.

The parts that fit the minutes run in the order of their worth, each in a process of its own with a time limit, and the
page is written again as each ends. What cannot run here is marked as not run. Installs nothing, and needs no network.

\b
Exit codes: 0, every part that there was time for ran, and every figure held; 1, some did not, or there is no GPU.
"""

# Only the standard library: each part imports what it needs, and a missing package is named in one line.
import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from .on_gpu.earlier import Earlier
from .on_gpu.findings import Findings
from .on_gpu.page import write_page
from .on_gpu.parts import PARTS
from .on_gpu.running import Runner
from .pieces import join

MINUTES = 9.0
"""Ten minutes are what rented machines often give a command."""


def main() -> int:
    """Run the parts, or one of them as the process that it has to itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="where the page goes; it is Markdown")
    parser.add_argument(
        "--part", action="append", choices=[part.name for part in PARTS], help="repeatable; default: all"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts; default: %(default)g")
    parser.add_argument("--found", type=Path, help="a folder for findings; parts whose files it has are not run again")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, and of pairs, to have on the path meanwhile")
    for hidden in ("--worker", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        _work(asked)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the part that runs is ended, and is on the page
    with tempfile.TemporaryDirectory(prefix="thermopile-gpu-") as folder:
        if asked.wheels:
            _add_wheels(asked.wheels, Path(folder, "site"))
        return _measure(asked, Path(folder))


def _add_wheels(wheels: Path, to: Path) -> None:
    """Unpack wheels where this process and those of the parts find them. Exits with a line if it cannot."""
    join(wheels)
    files = [*map(str, wheels.glob("*.whl"))]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(to)]
    if not files or subprocess.run([*command, *files]).returncode:
        why = "pip refused its wheels, see above" if files else "it holds no wheels"
        sys.exit(f"Nothing was measured. --wheels {wheels}: {why}; make gpu-wheels fills build/gpu-wheels")
    sys.path.insert(1, str(to))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(to)]))
    if (wheels / "pairs").is_dir():
        os.environ["THERMOPILE_PAIRS"] = str((wheels / "pairs").resolve())


def _measure(asked: argparse.Namespace, folder: Path) -> int:
    machine = _machine()
    if isinstance(machine, str) or (asked.device == "cuda" and not machine["gpus"]):
        why = machine if isinstance(machine, str) else f"no GPU: torch {machine['versions']['torch']} finds none"
        print(f"Nothing was measured. {why}", file=sys.stderr)
        return 1
    script = [sys.executable, "-m", "benchmarks.gpu", "--device", asked.device, *(["--small"] if asked.small else [])]
    script += ["--found", str(asked.found)] if asked.found else []
    runner = Runner([*script, "--folder", str(folder)], folder, 60 * asked.minutes)
    earlier = Earlier(asked.found, machine, asked.device, asked.small) if asked.found else None
    for part in (part for part in PARTS if asked.part is None or part.name in asked.part):
        try:
            if earlier and (outcome := earlier.outcome(part)):
                runner.take_over(outcome)
                continue
            # The limits are a GPU's.
            runner.run(replace(part, seconds=600) if asked.small else part)
            if earlier:
                earlier.keep(runner.outcomes[-1])
        finally:
            if asked.page:
                write_page(asked.page, machine, runner.outcomes)
    for line in runner.complaints():
        print(line, file=sys.stderr)
    return 0 if runner.held else 1


def _work(asked: argparse.Namespace) -> None:
    (part,) = (part for part in PARTS if part.name == asked.worker)
    module, function = part.function.split(":")
    found = Findings(part.name, Path(asked.folder), asked.device, asked.small, asked.found)
    getattr(importlib.import_module(f".on_gpu.{module}", __package__), function)(found, *part.arguments)
    found.save()


def _machine() -> dict[str, Any] | str:
    """Return what on_gpu.machine prints, or one line with the reason why it could not.

    A process of its own: this one holds no memory of the GPU.
    """
    command = [sys.executable, "-m", "benchmarks.on_gpu.machine"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["the Python that runs this was killed"])[-1]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
