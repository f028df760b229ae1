"""A dataset as a command-line argument: a directory, or an address in an object store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..objects import Address, AddressError, is_address, place_of


class AnyPlace(click.Path):
    """A Path or an Address, which need not exist."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return place_of(value)
        except AddressError as error:
            self.fail(str(error), param, ctx)


class DatasetPath(click.Path):
    """An existing directory as a Path, or an Address; for an unfinished conversion, the error says how to continue."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, Address) or is_address(str(value)):
            return AnyPlace().convert(value, param, ctx)
        if not os.path.isfile(os.path.join(value, "dataset.json")):
            from ..pipeline.conversion.partial import Partial

            if Partial(Path(value)).in_progress:
                self.fail(f"{value} is incomplete: its conversion was interrupted or is still running; continue it "
                          f"with `thermopile convert … {value} --resume`", param, ctx)  # fmt: skip
        return super().convert(value, param, ctx)
