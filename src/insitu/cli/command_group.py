"""The group of all commands, and what they share: examples of what is missing, and declared options."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar

import click
import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from insitu.base.errors import InputError
from insitu.base.plugins import COMMANDS, list_plugins, load_plugin
from insitu.cli.console import print_notice
from insitu.cli.remote import run_where_due
from insitu.options import Declared, Option, options_of

START_EXAMPLES = """
Start a training job on the nodes that hold CACHE, and stream its output.

A dash in place of CACHE is for a script that brings its own data: it then has one worker for each node,
unless --workers says otherwise. The address of a cache of Apache Ignite is read first, once; each worker then
trains beside a server of it.

JOB_DIR is a folder or a .zip that holds the script; the job runs a copy of it. Options come before CACHE:
everything after JOB_CMD belongs to the script. Worker 0 is the chief; --chief adds it to --workers. Ctrl-C
detaches, the job continues. The exit code is that of the training (128 + the signal's number if a signal
ended it, 124 if it stood still, 143 if it was stopped). Jobs and caches are in the folder $INSITU_HOME, by
default ~/.insitu.

Examples:

    insitu start digits/train ./my_job train.py
    insitu start --workers 2 --seed 7 digits/train ./my_job train.py --epochs 3
    insitu start --detach --name nightly quickdraw job.zip python train.py
    insitu start --workers 2 --ps 1 --chief digits ./my_job parameter_server.py
    insitu start --ps auto clicks/train ./my_job train.py
    insitu start --workers 2 - ./my_job train.py
    insitu start --tensor image=uint8[28,28] ignite://grid-1,grid-2/DIGITS ./my_job train.py
"""


def show_version(requested: bool) -> None:
    """Print the version and exit, if that was `requested`."""
    if requested:
        from insitu.base._version import __version__

        click.echo(f"insitu {__version__}")
        click.get_current_context().exit()


class VersionedGroup(TyperGroup):
    """Has each command print the version on --version, as the command line itself does."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None and not any("-V" in each.opts for each in command.params):
            option = TyperOption(
                param_decls=["--version", "-V"], is_flag=True, is_eager=True, expose_value=False, hidden=True,
                callback=lambda ctx, option, value: show_version(value),
            )  # fmt: skip
            command.params.append(option)
        return command


class CommandGroup(VersionedGroup):
    """Has the head run commands that are for it, and finds those of plug-ins, which run on this machine.

    Leaves the suggestion to Click where that makes one: Typer would add the same a second time.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        self.suggest_commands = not hasattr(click.exceptions, "NoSuchCommand")
        name, command, rest = super().resolve_command(ctx, args)
        if name in self.commands:
            return name, command and run_where_due(command, [*args]), rest
        if ctx.params.get("cluster"):
            raise InputError(
                f"`insitu {name}` runs on this machine. Received: --cluster {ctx.params['cluster']}. Leave "
                "it out"
            )
        return name, command, rest

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *list_plugins(COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in list_plugins(COMMANDS):
            command = typer.main.get_command(load_plugin(COMMANDS, cmd_name))
            command.name = cmd_name
            command.rich_help_panel = "More"  # type: ignore[attr-defined]
            return command
        return super().get_command(ctx, cmd_name)


class StartCommand(TyperCommand):
    """Says which of CACHE, JOB_DIR and JOB_CMD are missing, by example, and which options come too late."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = " ".join(args)
        try:
            rest = super().parse_args(ctx, args)
            self._tell_of_late_options(ctx.params.get("command") or ())
            return rest
        except click.MissingParameter as error:
            words = [str(ctx.params[name]) for name in ("cache", "job_dir") if ctx.params.get(name)]
            example = complete_arguments(words)
            missing = ", ".join(name for name in _EXAMPLE if example[name] not in words)
            raise click.UsageError(
                "insitu start needs a cache, a folder, and a script in that folder. Received: "
                f"{given or 'none of them'}. Missing: {missing}. Example: insitu start "
                f"{' '.join(example.values())}",
                ctx,
            ) from error

    def _tell_of_late_options(self, command: Sequence[str]) -> None:
        own = {
            name for each in self.params for name in (*each.opts, *each.secondary_opts) if name[:2] == "--"
        }
        late = [word for word in command[1:] if word.partition("=")[0] in own]
        if late:
            print_notice(
                f"All that follows JOB_DIR is the job's command: {', '.join(late)} "
                f"{'goes' if len(late) == 1 else 'go'} to the script. Give options of start before CACHE"
            )


_EXAMPLE = {"CACHE": "digits/train", "JOB_DIR": "./my_job", "JOB_CMD": "train.py"}


def complete_arguments(words: Sequence[str]) -> dict[str, str]:
    """Return the arguments of `start` by name, where fewer than three were given, with examples for the rest.

    A folder or a .zip that comes first, and a script that comes second, stand where what was left out was.
    """
    found: dict[str, str] = {}
    for word in words:
        if not found and (os.path.isdir(word) or word.endswith(".zip")):
            name = "JOB_DIR"
        elif word.endswith(".py"):
            name = "JOB_CMD"
            folder, _, script = word.rpartition("/")
            if folder and "JOB_DIR" not in found:  # such as my_job/train.py
                found["JOB_DIR"] = folder if folder[0] in "./~" else f"./{folder}"
                word = script
        else:
            name = next(name for name in _EXAMPLE if name not in found)
        found[name] = word
    return {**_EXAMPLE, **found}


# Gives a command the options that a dataclass of `insitu.options` declares


_Made = TypeVar("_Made", bound=Declared)


def take_options(
    declaration: type[_Made],
    arguments: Mapping[str, Any],
    command: Callable[[_Made], None],
    *,
    complete: Mapping[str, Callable[[str], list[str]]] | None = None,
    only: Collection[str] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> Callable[..., None]:
    """Return a function for Typer that takes `arguments` and the options, and calls `command` with them.

    `arguments`: parameters by the fields of `declaration` that are no options. `complete` returns what the
    shell completes, by option. `only`: the options that are taken; None: all. `fixed`: the
    values of fields that aren't given.
    """
    chosen = [each for each in options_of(declaration) if only is None or each.name in only]

    def run(**given: Any) -> None:
        values = {
            name: tuple(given[name]) if type(given[name]) is list else given[name] for name in arguments
        }
        command(declaration(**(fixed or {}), **values, **{e.name: e.read(given[e.name]) for e in chosen}))

    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=each) for name, each in arguments.items()
    ]
    parameters += [_make_parameter(each, (complete or {}).get(each.name)) for each in chosen]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__name__ = command.__name__
    return run


def _make_parameter(declared: Option, complete: Callable[[str], list[str]] | None) -> Parameter:
    default = declared.write(declared.default)
    kind: Any = str if declared.words else list[str] if declared.many else declared.kind
    # Typer adds a name with --no- if no name is given.
    is_named = declared.flags or default is False
    given = typer.Option(
        *((declared.flags or (declared.flag,)) if is_named else ()),
        help=declared.help,
        metavar=declared.metavar or "|".join(declared.choices) or None,
        show_default=declared.default_text or True,
        autocompletion=complete,
    )
    if declared.many or default is None:
        kind, default = kind | None, None
    return Parameter(
        declared.name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, given], default=default
    )
