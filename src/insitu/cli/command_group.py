"""The group of all commands, and commands that say by example what is missing."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click
from typer.core import TyperCommand, TyperGroup

from insitu.cli.outside import ARGUMENTS

START_EXAMPLES = """
Start a training job on the nodes that hold CACHE, and stream its output.

A dash in place of CACHE is for a script that brings its own data: it then has one worker for each node,
unless --workers says otherwise. The address of a cache of Apache Ignite is read first, once; each worker then
trains beside a server of it.

JOB_DIR is a folder or a .zip that holds the script; the job runs a copy of it. Options come before CACHE:
everything after JOB_CMD belongs to the script. Worker 0 is the chief; --chief adds it to --workers. Ctrl-C
detaches, the job goes on. The exit code is that of the training (128 + the signal's number if a signal ended
it, 124 if it stood still, 143 if it was stopped). Jobs and caches lie in the folder $INSITU_HOME, by default
~/.insitu.

Examples:

    insitu start digits/train ./my_job train.py
    insitu start --workers 2 --seed 7 digits/train ./my_job train.py --epochs 3
    insitu start --detach --name nightly quickdraw job.zip python train.py
    insitu start --workers 2 --ps 1 --chief digits ./my_job parameter_server.py
    insitu start --ps auto clicks/train ./my_job train.py
    insitu start --workers 2 - ./my_job train.py
    insitu start --tensor image=uint8[28,28] ignite://grid-1,grid-2/DIGITS ./my_job train.py
"""


class CommandGroup(TyperGroup):
    """Leaves the suggestion to Click where that makes one: Typer would add the same a second time."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        ctx.meta[ARGUMENTS] = list(args)
        self.suggest_commands = not hasattr(click.exceptions, "NoSuchCommand")
        return super().resolve_command(ctx, args)


class StartCommand(TyperCommand):
    """Says which of CACHE, JOB_DIR and JOB_CMD are missing, by example."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = " ".join(args)
        try:
            return super().parse_args(ctx, args)
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
        else:
            name = next(name for name in _EXAMPLE if name not in found)
        found[name] = word
    return {**_EXAMPLE, **found}
