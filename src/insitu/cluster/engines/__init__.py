"""What starts processes on nodes, behind one seam.

Begin reading with `engine.py`, the seam; `local.py` is the engine of this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.engines.engine import Command, Ended, Output, SignalName
    from insitu.cluster.engines.local import LocalEngine

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "engine": ("Command", "Ended", "Output", "SignalName"),
        "local": ("LocalEngine",),
    },
)

__all__ = [
    "Command",
    "Ended",
    "LocalEngine",
    "Output",
    "SignalName",
]
