"""The group of all commands, which suggests a command where a name is mistyped."""

from __future__ import annotations

import click
from typer.core import TyperGroup


class CommandGroup(TyperGroup):
    """Leaves the suggestion to Click where that makes one: Typer would add the same a second time."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        self.suggest_commands = not hasattr(click.exceptions, "NoSuchCommand")
        return super().resolve_command(ctx, args)
