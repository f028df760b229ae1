"""A file, a directory or an address in an object store as a command-line argument."""

from __future__ import annotations

from typing import Any

import click

from ..storage.bucket import Address, AddressError, is_address
from ..storage.local import LocalPath
from ..storage.place import Place, place_of


class PlaceType(click.ParamType[Any]):
    """Gives an Address for `s3://bucket/path`, which need not exist, else what the type of a local path gives."""

    def __init__(self, local: click.Path) -> None:
        self.name, self._local = local.name, local

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        if isinstance(value, Address):
            return value
        if not (isinstance(value, str) and is_address(value)):
            path: Place = self._local.convert(value, param, ctx)  # type: ignore[assignment]
            return path
        try:
            return place_of(value)
        except AddressError as error:
            self.fail(str(error), param, ctx)


ANY_PLACE = PlaceType(click.Path(path_type=LocalPath))
"""A path or an address of which nothing is asked."""
