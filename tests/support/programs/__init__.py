"""Programs that tests start, kill or fork. Those with a usage line also run by hand."""

import sys
from pathlib import Path


def program(name: str, *arguments: object) -> list[str]:
    """Return the command line that starts a program."""
    return [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *map(str, arguments)]
