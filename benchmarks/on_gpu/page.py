"""The page: the machine, what was asked and found, and each part's tables. Written as each part ends."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from thermopile.storage.files import write_atomically

from ..markdown import table
from .running import Outcome


def write_page(path: Path, machine: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write the page, Markdown."""
    write_atomically(path, to_markdown(machine, outcomes).encode())


def to_markdown(machine: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """machine: as machine.describe returns it."""
    blocks = [
        "# On a GPU",
        "Written by `make gpu PYTHON=…`, which runs in the environment of that Python and installs nothing.",
        table(("machine", ""), _of_machine(machine)),
    ]
    checks = [check for outcome in outcomes for check in outcome.found.get("checks", [])]
    if checks:
        rows = ((check["what"], check["asked"], check["found"], "held" if check["held"] else "**missed**")
                for check in checks)  # fmt: skip
        blocks += ["## What is asked", table(("figure", "asked", "found", ""), rows)]
    for outcome in outcomes:
        blocks.append(f"## {outcome.part.title}")
        found = outcome.found
        for each in found.get("tables", []):
            blocks += [f"{each['title']}:", table(each["heading"], each["rows"])]
        blocks += found.get("notes", [])
        if outcome.problem:
            blocks.append(f"**{outcome.problem[0].upper()}{outcome.problem[1:]}.**")
        else:
            blocks.append(f"This part took {outcome.seconds:.0f} s.")
    return "\n\n".join(blocks) + "\n"


def _of_machine(machine: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for number, gpu in enumerate(machine["gpus"]):
        yield f"GPU {number}", f"{gpu['name']}, {gpu['bytes'] / 2**30:.0f} GiB, compute capability {gpu['capability']}"
    if not machine["gpus"]:
        yield "GPU", "none"
    yield "driver", f"{machine['driver']}, CUDA {machine['cuda'] or 'none'} of torch"
    yield "CPU", f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_bytes'] / 1e9:.0f} GB"
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    yield "versions", f"Python {machine['python']}, {versions}"
