"""A dataset as a command-line argument: a directory, or an address in an object store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..storage.local import LocalPath
from .place_type import PlaceType


class DatasetPath(PlaceType):
    """An existing directory as a Path, or an Address; for an unfinished conversion, the error says how to continue."""

    def __init__(self) -> None:
        super().__init__(_Directory(exists=True, file_okay=False, path_type=Path))


class _Directory(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.path.isfile(os.path.join(value, "dataset.json")):
            from ..pipeline.conversion.partial import Partial

            if Partial(LocalPath(value)).in_progress:
                self.fail(
                    f"{value} is incomplete: its conversion was interrupted or is still running; continue it "
                    f"with `thermopile convert … {value} --resume`",
                    param,
                    ctx,
                )
        return super().convert(value, param, ctx)
