"""Measure what this package does on a GPU, and write a page: `make gpu`.

Each part runs in a process of its own with a time limit, and the page is written again as each ends. What cannot run
here is marked as not run. Takes at most ten minutes, installs nothing, and needs no network.

\b
Exit codes: 0, every part ran; 1, some did not or failed, or there is no GPU.
"""

# Only the standard library: each part imports what it needs, and a missing package is named in one line.
import argparse
import importlib
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from on_gpu.findings import Findings
from on_gpu.page import write_page
from on_gpu.parts import PARTS
from on_gpu.running import Runner

MINUTES = 10.0


def main() -> int:
    """Run the parts, or one of them as the process that it has to itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="where the page goes; it is Markdown")
    parser.add_argument(
        "--part", action="append", choices=[part.name for part in PARTS], help="repeatable; default: all"
    )
    for hidden in ("--worker", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        _work(asked)
        return 0
    machine = _machine()
    if isinstance(machine, str) or (asked.device == "cuda" and not machine["gpus"]):
        why = machine if isinstance(machine, str) else f"no GPU: torch {machine['versions']['torch']} finds none"
        print(f"Nothing was measured. {why}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="thermopile-gpu-") as folder:
        script = [sys.executable, __file__, "--device", asked.device, *(["--small"] if asked.small else [])]
        runner = Runner([*script, "--folder", folder], Path(folder), math.inf if asked.small else 60 * MINUTES)
        for part in (part for part in PARTS if asked.part is None or part.name in asked.part):
            # The limits are a GPU's.
            runner.run(replace(part, seconds=600) if asked.small else part)
            if asked.page:
                write_page(asked.page, machine, runner.outcomes)
    for line in runner.complaints():
        print(line, file=sys.stderr)
    return 1 if runner.incomplete else 0


def _work(asked: argparse.Namespace) -> None:
    (part,) = (part for part in PARTS if part.name == asked.worker)
    module, function = part.function.split(":")
    found = Findings(part.name, Path(asked.folder), asked.device, asked.small)
    getattr(importlib.import_module(f"on_gpu.{module}"), function)(found, *part.arguments)
    found.save()


def _machine() -> dict[str, Any] | str:
    """Return what on_gpu.machine prints, or one line with the reason why it could not.

    A process of its own: this one holds no memory of the GPU.
    """
    command = [sys.executable, str(Path(__file__).with_name("on_gpu") / "machine.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["the Python that runs this was killed"])[-1]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
