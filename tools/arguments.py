"""Arguments and options shared by commands: places, datasets, runs, and leave to import a user's own code."""

import os
from shlex import quote
from typing import Any

import click

from ..storage.bucket import Address, is_address
from ..storage.bucket_errors import AddressError
from ..storage.local import LocalPath
from ..storage.place import place_of


class PlaceType(click.ParamType[Any]):
    """Gives an Address for `s3://…`, which need not exist; what begins with `left` as typed; or what `local` gives."""

    def __init__(self, local: click.Path, *left: str) -> None:
        self.name, self._local, self._left = local.name, local, left

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, Address) or str(value).startswith(self._left):
            return value
        if not (isinstance(value, str) and is_address(value)):
            return self._local.convert(value, param, ctx)
        try:
            return place_of(value)
        except AddressError as error:
            self.fail(str(error), param, ctx)


ANY_PLACE = PlaceType(click.Path(path_type=LocalPath))
"""A path or an address of which nothing is asked."""


class _Directory(click.Path):
    """An existing directory; for an unfinished conversion, the error says how to continue."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.path.isfile(os.path.join(value, "dataset.json")):
            from ..pipeline.conversion.partial import Partial

            if Partial(LocalPath(value)).in_progress:
                why = "its conversion was interrupted or is still running"
                cure = f"continue it with `thermopile convert … {quote(str(value))} --resume`"
                self.fail(f"{value} is incomplete: {why}; {cure}", param, ctx)
        return super().convert(value, param, ctx)


DATASET = PlaceType(_Directory(exists=True, file_okay=False, path_type=LocalPath))


def flag(name: str, help: str) -> click.Option:
    return click.Option([f"--{name}"], is_flag=True, help=help)


def defaulting(name: str, kind: click.ParamType[Any], default: object, help: str) -> click.Option:
    """Return an option whose default the help shows."""
    return click.Option([f"--{name}"], type=kind, default=default, show_default=True, help=help)


RUN = click.argument("run", type=ANY_PLACE)
AT = click.option("--at", default="latest", show_default=True, metavar="step-N", help="The checkpoint to use.")
WEIGHTS = click.option(
    "--weights",
    type=click.Choice(["averaged", "raw"]),
    show_default="averaged, where the run has them",
    help="The moving average of the weights (model.ema), or the weights themselves.",
)
TARS_HELP = "Where the tars of a dataset in place are now."
TARS = click.option("--tars", type=ANY_PLACE, metavar="ROOT", help=TARS_HELP)
RUN_DATA = click.option(
    "--data",
    type=DATASET,
    multiple=True,
    callback=lambda *given: given[-1] or None,
    help="New path of the run's dataset, if it was moved; of a mixture, repeat it for each part, in their order.",
)
ALLOW = click.option("--allow-code", is_flag=True, help="Allow the run's settings to import code: `module:name`.")
