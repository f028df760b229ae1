"""A directory or an address in an object store, which need not exist yet, as a command-line argument."""

from __future__ import annotations

from typing import Any

import click

from ..objects import AddressError, Place, place_of


class PlaceType(click.ParamType[Any]):
    """Gives a Path, or an Address for `s3://bucket/path`."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        try:
            place = place_of(value)
        except AddressError as error:
            self.fail(str(error), param, ctx)
        return place
