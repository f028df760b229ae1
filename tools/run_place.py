"""A run as a command-line argument: a directory, or an address in an object store."""

import click

from .place_type import ANY_PLACE

RUN = click.argument("run", type=ANY_PLACE)
