"""The page: the machine, what was asked and found, and each part's tables. Written as each part ends."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from thermopile.storage.files import write_atomically

from ..markdown import table
from .running import Outcome

HOW = """\
Written by `make gpu PYTHON=…`, which runs in the environment of that Python, with torch for CUDA and the packages of
constraints.txt, and installs nothing. It takes at most `MINUTES=N`, 9 by default, and begins with the most telling
parts; a second command with the same `FOUND=folder` measures what the first had no time for or missed.

A bare machine without a network needs torch 2.11 and transformers 5.17, or newer. Where there is a network,
`make gpu-wheels` fills build/gpu-wheels with what else it lacks, 40 MB for Python 3.12, ffcv compiled for it, and with
16 MB of pairs. On the bare machine, `make gpu PYTHON=python3 WHEELS=build/gpu-wheels` has them on its path meanwhile.

DALI is 269 MB more: `make gpu-wheels DALI=1` adds it, and cuts all that is brought into build/gpu-wheels-1 to -8, of
45 MB at most, for a machine that takes no more at once. There, with each of these folders, in any order, and at last:

```sh
python3 -m benchmarks.pieces gather build/gpu-wheels-1 /tmp/gpu-wheels    # it says which pieces are lacking
make gpu PYTHON=python3 WHEELS=/tmp/gpu-wheels    # joins them by their digests, or says what is lacking
```

The real training is on those pairs, or on the icons that THERMOPILE_ICONS names, a file of `python -m benchmarks.icons
FOLDER --icons 50000`, 42 MB. With `FOUND=folder`, its report is in that folder."""


def write_page(path: Path, machine: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write the page, Markdown."""
    write_atomically(path, to_markdown(machine, outcomes).encode())


def to_markdown(machine: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """machine: as machine.describe returns it."""
    blocks = [
        "# On a GPU",
        HOW,
        table(("machine", ""), _of_machine(machine)),
    ]
    checks = [check for outcome in outcomes for check in outcome.found.get("checks", [])]
    if checks:
        rows = ((check["what"], check["asked"], check["found"], "held" if check["held"] else "**missed**")
                for check in checks)  # fmt: skip
        blocks += ["## What is asked", table(("figure", "asked", "found", ""), rows)]
    not_run: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.problem.startswith("not run: "):
            not_run.setdefault(outcome.problem, []).append(outcome.part.title)
            continue
        blocks.append(f"## {outcome.part.title}")
        found = outcome.found
        for each in found.get("tables", []):
            blocks += [f"{each['title']}:", table(each["heading"], each["rows"])]
        blocks += found.get("notes", [])
        if outcome.problem:
            blocks.append(f"**{outcome.problem[0].upper()}{outcome.problem[1:]}.**")
        else:
            blocks.append(f"This part took {outcome.seconds:.0f} s.")
    if not_run:
        lines = (f"- {problem.removeprefix('not run: ')}: {'; '.join(titles)}" for problem, titles in not_run.items())
        blocks += ["## Not run", "\n".join(lines)]
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
