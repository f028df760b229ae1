"""A dataset directory as a command-line argument."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class DatasetPath(click.Path):
    """An existing directory; for an unfinished conversion, the error says how to continue it."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.path.isfile(os.path.join(value, "dataset.json")):
            from ..pipeline.conversion.partial import Partial

            if Partial(Path(value)).in_progress:
                self.fail(f"{value} is incomplete: its conversion was interrupted or is still running; continue it "
                          f"with `thermopile convert … {value} --resume`", param, ctx)  # fmt: skip
        return super().convert(value, param, ctx)
