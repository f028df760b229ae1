"""A run as a command-line argument: a directory, or an address in an object store."""

from __future__ import annotations

from typing import Any

import click

from ..objects import AddressError
from ..places import Place, place_of


class RunPlace(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A path, which need not exist, or an address such as s3://bucket/runs/a."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        try:
            return place_of(value)
        except AddressError as error:
            self.fail(str(error), param, ctx)


RUN = click.argument("run", type=RunPlace())
