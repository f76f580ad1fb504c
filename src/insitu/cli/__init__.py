"""The command line: `insitu`, also `python -m insitu`.

Exit codes: 0 done; 1 it failed; 2 the request can't be used; 3 the job has ended already; 130 the
user interrupted. `start` and `attach` exit with the code of the training.

Commands of plug-ins are made with what this door gives.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cli.command_group import VersionedGroup, take_options
    from insitu.cli.console import JsonOption, ask_to_delete, print_json, print_notice, print_table
    from insitu.cli.drain import parse_duration

__getattr__, __dir__ = export_lazily(__name__)

INTERRUPTED = 130
_STDOUT, _STDERR = 1, 2


def build_app() -> object:
    """Return the whole command line, as a Typer application."""
    import typer

    from insitu.cli.command_group import CommandGroup, show_version
    from insitu.cli.remote import CLUSTER_OPTION

    app = typer.Typer(
        name="insitu",
        cls=CommandGroup,
        help="Train where the data lives: distributed Keras training on the nodes that hold the data.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", "-V", help="Print the version.", callback=show_version, is_eager=True
        ),
        cluster: str = typer.Option("", "--cluster", **CLUSTER_OPTION),
        for_caller: str = typer.Option("", "--for-caller", hidden=True),
    ) -> None:
        if for_caller:  # a head that was started in the background ignores it, and so would this process
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in ("out", "err"):
            if name in for_caller.split(","):  # so it is, though this process writes to a pipe
                getattr(sys, f"std{name}").isatty = lambda: True

    for panel, modules in _list_modules().items():
        commands, groups = len(app.registered_commands), len(app.registered_groups)
        for module in modules:
            module.register(app)
        for command in app.registered_commands[commands:]:
            command.rich_help_panel = panel
        for group in app.registered_groups[groups:]:
            group.rich_help_panel = panel
    return app


def _list_modules() -> dict[str, tuple[Any, ...]]:
    """Return the modules that have commands, in the order of the help, by its headings."""
    from insitu.cli import chaos, data, delete, describe, devices, doctor, drain, export, init, jobs, logs
    from insitu.cli import examples, fetch, files, nodes, prune, rebalance, repair, rows, scrub, serve  # isort: skip
    from insitu.cli import storage, top, track, ui  # isort: skip

    return {
        "Data": (data, rows, delete, export, fetch, rebalance, scrub, repair, storage, files),
        "Jobs": (init, jobs, logs, describe, top, track, prune),
        "Nodes": (nodes, drain, devices, doctor),
        "More": (ui, serve, examples, chaos),
    }


def _end_without_reader(*_: object) -> None:
    """End as other programs do, without a message, if the reader of the output has gone.

    The signal comes for a connection, too, whose other end has gone: that is an error of the call, and no end
    of an agent, a server or a command.
    """
    poll = select.poll()
    for stream in (_STDOUT, _STDERR):
        poll.register(stream, 0)
    if any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0)):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


def _run_app() -> None:
    try:
        build_app()()  # type: ignore[operator]
    except OSError:
        from insitu.base.paths import Paths
        from insitu.grid import home_errors

        with home_errors(Paths.default().home):
            raise
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        from insitu.base.errors import ClusterError

        raise ClusterError(
            "The system lets this user start no more threads. End some processes of this user, or allow "
            "more, such as by `ulimit -u 8192`"
        ) from error


def main() -> NoReturn:
    """Run the command line and exit."""
    from insitu.base.errors import InsituError
    from insitu.cli.console import print_error

    signal.signal(signal.SIGPIPE, _end_without_reader)
    code: Any = 0
    try:
        _run_app()
        sys.stdout.flush()
    except InsituError as error:
        print_error(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as end:
        code = end.code
    _leave(code)


def _leave(code: Any) -> NoReturn:
    """Exit with `code`, also if another interrupt comes meanwhile.

    An interrupt may leave threads of Arrow in the middle of their work. They abort the process if the
    interpreter is finalized beside them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code == INTERRUPTED:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
