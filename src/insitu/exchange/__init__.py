"""The exchange: moves buffers between the tasks of a job. `join` returns a `Group`.

Importing it is cheap: the modules behind it are loaded on first use. Scripts need `join` and `Group`. The
other names are for the rooms above. Begin reading with `group.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.exchange import handshake, memory, memory_passing
    from insitu.exchange.forks import close_in_children
    from insitu.exchange.group import Group
    from insitu.exchange.handshake import HandshakeSteps, InsecureSecret, PeerInfo, resolve_secret
    from insitu.exchange.joining import join
    from insitu.exchange.memory_grants import BORROWERS, GRANT_BYTES, Borrower, Lender
    from insitu.exchange.native import address_of
    from insitu.exchange.pages import ALIGNMENT, Pages, aligned_empty
    from insitu.exchange.peer_connections import (
        Silence,
        has_acknowledged_all,
        is_unreachable,
        measure_silence,
        read_host_timeout,
    )
    from insitu.exchange.plan import Mismatch
    from insitu.exchange.protocol import PROTOCOL_KEYS, describe_protocol
    from insitu.exchange.rendezvous import parse_address
    from insitu.exchange.resolver import connect_within, resolve
    from insitu.exchange.socket_handshake import SocketHandshake
    from insitu.exchange.tls import read_tls_settings
    from insitu.exchange.tls_socket import TlsSocket

__getattr__, __dir__ = export_lazily(__name__)
