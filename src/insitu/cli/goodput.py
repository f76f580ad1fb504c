"""Prints where each second of a job went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from insitu.cli.console import format_duration, print_notice, print_table

_LEAST = 0.0005
"""Share of the time that an activity needs to be listed."""


def print_goodput(account: Mapping[str, Any]) -> None:
    """Print the account of a job, as `Goodput.to_json` returns it."""
    typer.echo("")
    wall = account["wall"]
    if not wall or not account["tasks"]:
        print_notice("No task has run yet, so there is no time to account for.")
        return
    typer.echo(
        f"Goodput: {account['goodput']:.1%} of {format_duration(wall)} ({wall:,.1f} s) went into gradients "
        "and updates of the model."
    )
    typer.echo("")
    own = {task["task"]: task["seconds"] for task in (*account["tasks"], *account["other_tasks"])}
    names = dict.fromkeys(name for seconds in (account["seconds"], *own.values()) for name in seconds)
    shown = [
        n for n in names if max(s.get(n, 0.0) for s in (account["seconds"], *own.values())) >= _LEAST * wall
    ]
    print_table(
        ("ACTIVITY", "SHARE", "MEAN", *own),
        (
            (
                name,
                f"{account['seconds'].get(name, 0.0) / wall:.1%}",
                f"{account['seconds'].get(name, 0.0):,.2f} s",
                *(f"{seconds.get(name, 0.0):,.2f} s" for seconds in own.values()),
            )
            for name in shown
        ),
    )
    for number, loss in enumerate(account["losses"], 1):
        typer.echo(f"\n{number}. {loss['activity']}: {loss['text']}.\n   {loss['advice']}.")
