"""Shows how fast tasks train and what they use, for `describe` and `top`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from insitu.cli.console import format_size, print_table
from insitu.service import format_split

RATES_HEADER = ("TASK", "ROWS/S", "STEP", "OF WHICH", "CORES", "MEMORY", "GPU")


def print_rates(tasks: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of the tasks that have measured anything."""
    measured = [task for task in tasks if task["rates"]]
    if measured:
        typer.echo("")
        print_table(RATES_HEADER, map(format_rates, measured))


def format_rates(task: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the row of a task, for `RATES_HEADER`."""
    rates = task["rates"]
    if not rates:
        return (task["task"], *["-"] * (len(RATES_HEADER) - 1))
    rows, step = rates["rows_per_second"], rates["step_seconds"]
    return (
        task["task"],
        "-" if rows is None else f"{rows:,.0f}",
        "-" if step is None else format_milliseconds(step),
        format_split(rates["split"], step) or "-",
        f"{rates['cpu']:.2f}",
        format_size(rates["memory"]),
        _format_gpus(rates["gpus"]) or "-",
    )


def format_milliseconds(seconds: float) -> str:
    """Return such as `15.7 ms`."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _format_gpus(gpus: Sequence[Mapping[str, float]]) -> str:
    """Return such as `0: 93 % 4.1 GB`."""
    return ", ".join(
        f"{gpu['index']:.0f}: {100 * gpu['utilization']:.0f} % {format_size(int(gpu['memory']))}"
        for gpu in gpus
    )
