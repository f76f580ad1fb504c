"""The command line in this process. It is made once: Typer takes a tenth of a second for that."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import click
from click.testing import Result

from insitu.cli import build_app

with warnings.catch_warnings():
    # Typer takes from Click what Click calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer.main
    import typer.testing


@functools.cache
def make_command() -> click.Command:
    """Return the whole command line."""
    app: Any = build_app()
    return typer.main.get_command(app)


class CliRunner(click.testing.CliRunner):
    """Runs commands of `insitu`."""

    def run(self, arguments: Any, **options: Any) -> Result:
        """Return what a command has printed, and the exception that it ended with."""
        return self.invoke(make_command(), arguments, **options)


def run(*arguments: str, **options: Any) -> Any:
    """Return what a command of `insitu` has printed. Raises what it raises, other than an exit."""
    result = CliRunner().run(arguments, **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
