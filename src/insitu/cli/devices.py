"""`insitu devices`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Any

import typer

from insitu.base.config import BACKENDS
from insitu.base.errors import InputError, TrainingError
from insitu.cli.console import JsonOption, print_json, print_table

DEADLINE = 120.0
"""Seconds that a backend may take to say which devices it has."""


def devices(
    backend: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(BACKENDS)}.", show_default="that of Keras"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the devices of this machine by the names that strategies take.

    Examples:

    ```
    insitu devices
    insitu devices --backend jax --json
    ```
    """
    from insitu.train.backends import active_name

    found = ask(backend or active_name())
    if as_json:
        print_json(found)
        return
    header = ("DEVICE", "BACKEND", "CALLED THERE", "MODEL", "MEMORY")
    print_table(header, (_row(device) for device in found))


def ask(backend: str, seconds: float = DEADLINE) -> list[dict[str, Any]]:
    """Return the devices of `backend`, found by a process of its own: backends print a lot, and keep memory.

    Raises InputError for a backend that isn't there, TrainingError where it doesn't start.
    """
    if backend not in BACKENDS:
        raise InputError(f"--backend is one of {', '.join(BACKENDS)}. Received: {backend!r}")
    command = [sys.executable, "-m", "insitu.train.devices", backend]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise TrainingError(f"{backend} did not start within {seconds:g} s.") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TrainingError(f"{backend} does not start: {last}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if isinstance(answer, dict):
        raise InputError(answer["error"])
    found: list[dict[str, Any]] = answer
    return found


def _row(device: dict[str, Any]) -> tuple[str, ...]:
    memory = device["memory"]
    return (
        device["name"] + (" (virtual)" if device["virtual"] else ""),
        device["backend"],
        device["native"],
        device["model"] or "-",
        f"{memory / 2**30:.1f} GiB" if memory else "-",
    )


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(devices)
