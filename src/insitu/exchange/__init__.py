"""The exchange: moves buffers between the tasks of a job. `join` returns a `Group`.

Importing it is cheap: the modules behind it are loaded on first use. Scripts need `join` and `Group`. The
other names are for the rooms above. Begin reading with `group.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.exchange import compiling, handshake, memory
    from insitu.exchange.group import Group
    from insitu.exchange.handshake import HandshakeSteps, PeerInfo
    from insitu.exchange.joining import join
    from insitu.exchange.native import address_of
    from insitu.exchange.pages import ALIGNMENT, Pages, aligned_empty
    from insitu.exchange.plan import Mismatch
    from insitu.exchange.rendezvous import parse_address

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "compiling": ("compiling",),
        "group": ("Group",),
        "handshake": ("HandshakeSteps", "PeerInfo", "handshake"),
        "joining": ("join",),
        "memory": ("memory",),
        "native": ("address_of",),
        "pages": ("ALIGNMENT", "Pages", "aligned_empty"),
        "plan": ("Mismatch",),
        "rendezvous": ("parse_address",),
    },
)

__all__ = [
    "ALIGNMENT",
    "Group",
    "HandshakeSteps",
    "Mismatch",
    "Pages",
    "PeerInfo",
    "address_of",
    "aligned_empty",
    "compiling",
    "handshake",
    "join",
    "memory",
    "parse_address",
]
