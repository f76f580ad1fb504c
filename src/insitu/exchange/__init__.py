"""The exchange: moves buffers between the tasks of a job. `join` returns a `Group`.

Importing it is cheap: the modules behind it are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.exchange.group import Group
    from insitu.exchange.joining import join

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "group": ("Group",),
        "joining": ("join",),
    },
)

__all__ = ["Group", "join"]
