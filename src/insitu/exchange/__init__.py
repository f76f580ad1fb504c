"""The exchange: moves buffers between the tasks of a job. `join` returns a `Group`.

Importing it is cheap: the modules behind it are loaded on first use. Scripts need `join` and `Group`. The
other names are for the rooms above. Begin reading with `group.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.exchange import compiling, handshake, memory, memory_passing
    from insitu.exchange.forks import close_in_children
    from insitu.exchange.group import Group
    from insitu.exchange.handshake import HandshakeSteps, InsecureSecret, PeerInfo, resolve_secret
    from insitu.exchange.joining import join
    from insitu.exchange.liveness import (
        Silence,
        has_acknowledged_all,
        is_unreachable,
        measure_silence,
        read_host_timeout,
    )
    from insitu.exchange.memory_grants import BORROWERS, GRANT_BYTES, Borrower, Lender
    from insitu.exchange.native import address_of
    from insitu.exchange.pages import ALIGNMENT, Pages, aligned_empty
    from insitu.exchange.plan import Mismatch
    from insitu.exchange.protocol import PROTOCOL_KEYS, describe_protocol
    from insitu.exchange.rendezvous import parse_address
    from insitu.exchange.resolver import connect_within, resolve
    from insitu.exchange.socket_handshake import SocketHandshake
    from insitu.exchange.tls import read_tls_settings
    from insitu.exchange.tls_socket import TlsSocket

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "compiling": ("compiling",),
        "forks": ("close_in_children",),
        "group": ("Group",),
        "handshake": ("HandshakeSteps", "InsecureSecret", "PeerInfo", "handshake", "resolve_secret"),
        "joining": ("join",),
        "liveness": (
            "Silence",
            "has_acknowledged_all",
            "is_unreachable",
            "measure_silence",
            "read_host_timeout",
        ),
        "memory": ("memory",),
        "memory_grants": ("BORROWERS", "GRANT_BYTES", "Borrower", "Lender"),
        "memory_passing": ("memory_passing",),
        "native": ("address_of",),
        "pages": ("ALIGNMENT", "Pages", "aligned_empty"),
        "protocol": ("PROTOCOL_KEYS", "describe_protocol"),
        "plan": ("Mismatch",),
        "rendezvous": ("parse_address",),
        "resolver": ("connect_within", "resolve"),
        "socket_handshake": ("SocketHandshake",),
        "tls": ("read_tls_settings",),
        "tls_socket": ("TlsSocket",),
    },
)

__all__ = [
    "ALIGNMENT",
    "BORROWERS",
    "GRANT_BYTES",
    "PROTOCOL_KEYS",
    "Borrower",
    "Group",
    "HandshakeSteps",
    "InsecureSecret",
    "Lender",
    "Mismatch",
    "Pages",
    "PeerInfo",
    "Silence",
    "SocketHandshake",
    "TlsSocket",
    "address_of",
    "aligned_empty",
    "close_in_children",
    "compiling",
    "connect_within",
    "describe_protocol",
    "handshake",
    "has_acknowledged_all",
    "is_unreachable",
    "join",
    "measure_silence",
    "memory",
    "memory_passing",
    "parse_address",
    "read_host_timeout",
    "read_tls_settings",
    "resolve",
    "resolve_secret",
]
