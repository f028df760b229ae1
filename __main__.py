"""`python -m thermopile` is `thermopile`."""

from .tools.cli import main

main(prog_name="thermopile")
