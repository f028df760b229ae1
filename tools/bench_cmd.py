"""`thermopile bench`: what a part of thermopile costs on this machine, beside what a user would pick instead."""

from __future__ import annotations

import click

from .bench.convert.command import convert
from .bench.inspect.command import inspect
from .bench.loader.command import loader
from .bench.objective.command import objective
from .bench.state.command import state
from .bench.step.command import step


@click.group(epilog="\b\nExamples:\n  thermopile bench state --part rows\n  thermopile bench loader --part single")
def bench() -> None:
    """Measure on this machine."""


for command in (loader, convert, objective, state, step, inspect):
    bench.add_command(command)
