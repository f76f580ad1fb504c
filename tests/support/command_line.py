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
