"""The command line: `insitu`, also `python -m insitu`.

Exit codes: 0 done; 1 it failed; 2 the request can't be used; 3 the job has ended already; 130 the
user interrupted. `start` and `attach` exit with the code of the training.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Any, NoReturn

INTERRUPTED = 130
_STDOUT, _STDERR = 1, 2


def build_app() -> object:
    """Return the whole command line, as a Typer application."""
    import typer

    from insitu._version import __version__
    from insitu.cli.by_url import URL_OPTION, run_by_url
    from insitu.cli.command_group import CommandGroup
    from insitu.cli.outside import CLUSTER_OPTION, run_from_outside

    app = typer.Typer(
        name="insitu",
        cls=CommandGroup,
        help="Train where the data lives: distributed Keras training on the nodes that hold the data.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    def show_version(requested: bool) -> None:
        if requested:
            typer.echo(f"insitu {__version__}")
            raise typer.Exit()

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", "-V", help="Print the version.", callback=show_version, is_eager=True
        ),
        cluster: str = typer.Option("", "--cluster", **CLUSTER_OPTION),
        url: str = typer.Option("", "--url", **URL_OPTION),
    ) -> None:
        run_by_url(url)
        run_from_outside(cluster, _follow_top)

    for panel, modules in _list_modules().items():
        commands, groups = len(app.registered_commands), len(app.registered_groups)
        for module in modules:
            module.register(app)
        for command in app.registered_commands[commands:]:
            command.rich_help_panel = panel
        for group in app.registered_groups[groups:]:
            group.rich_help_panel = panel
    return app


def _follow_top(*arguments: Any) -> int:
    from insitu.cli.top import follow_answers

    return follow_answers(*arguments)


def _list_modules() -> dict[str, tuple[Any, ...]]:
    """Return the modules that have commands, in the order of the help, by its headings."""
    from insitu.cli import chaos, data, delete, describe, devices, drain, export, jobs, nodes, repair, scrub
    from insitu.cli import examples, fetch, files, rebalance, serve, storage, top, ui  # isort: skip

    return {
        "Data": (data, delete, export, fetch, rebalance, scrub, repair, storage, files),
        "Jobs": (jobs, describe, top),
        "Nodes": (nodes, drain, devices),
        "More": (ui, serve, examples, chaos),
    }


def _end_without_reader(*_: object) -> None:
    """End as other programs do, without a message, where the reader of the output has gone.

    The signal comes for a connection, too, whose other end has gone: that is an error of the call, and no end
    of an agent, a server or a command.
    """
    poll = select.poll()
    for stream in (_STDOUT, _STDERR):
        poll.register(stream, 0)
    if any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0)):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


def main() -> NoReturn:
    """Run the command line and exit."""
    from insitu.cli.console import print_error
    from insitu.errors import InsituError

    signal.signal(signal.SIGPIPE, _end_without_reader)
    try:
        build_app()()  # type: ignore[operator]
        sys.stdout.flush()
        code = 0
    except InsituError as error:
        print_error(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)
