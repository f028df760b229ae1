import click


@click.command()
@click.argument("run")
def inspect(run: str) -> None:
    """x"""
