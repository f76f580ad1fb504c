"""Waits for descriptors of any number. `select` takes those below 1,024 only."""

from __future__ import annotations

import selectors
from collections.abc import Sequence
from typing import Any


def wait_readable(things: Sequence[Any], seconds: float | None = None) -> list[Any]:
    """Return those of `things` that can be read, once there is one, or none after `seconds`."""
    with selectors.DefaultSelector() as selector:
        for thing in things:
            selector.register(thing, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]
