"""The group of all commands, and commands that say by example what is missing."""

from __future__ import annotations

import click
from typer.core import TyperCommand, TyperGroup


class CommandGroup(TyperGroup):
    """Leaves the suggestion to Click where that makes one: Typer would add the same a second time."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
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
            example = [*words, *("digits/train", "./my_job", "train.py")[len(words) :]]
            missing = ", ".join(("CACHE", "JOB_DIR", "JOB_CMD")[len(words) :])
            raise click.UsageError(
                "insitu start needs a cache, a folder, and a script in that folder. Received: "
                f"{given or 'none of them'}. Missing: {missing}. Example: insitu start {' '.join(example)}",
                ctx,
            ) from error
