"""The option that allows a command to import a user's own code."""

import click

ALLOW = click.option("--allow-code", is_flag=True, help="Allow the run's settings to import code: `module:name`.")
