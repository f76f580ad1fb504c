"""Finds the agents that this machine can't reach, before something waits for them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from insitu.base.net.ports import format_address
from insitu.base.spec import NodeId
from insitu.cluster.decide import Member
from insitu.exchange import connect_within, has_acknowledged_all

# Finds out whether large packets arrive where a connection leads.
#
# A connection is made with small packets. Where the network passes no larger ones, and says so to nobody,
# it hangs only when data moves: as where hosts send packets of 9,000 bytes, and a switch between them takes
# 1,500


PROBE_BYTES = 1 << 14
"""More than a packet of any network has, and less than the other end's system takes unread."""
_LOOK_SECONDS = 0.01


def find_lost_packets(connection: socket.socket, data: bytes, seconds: float) -> str:
    """Send `data`, of PROBE_BYTES at least. Return why it doesn't arrive within so many seconds; "" where the
    other end's system has acknowledged it. Raises OSError."""
    deadline = time.monotonic() + seconds
    connection.sendall(data)
    while not has_acknowledged_all(connection):
        if time.monotonic() > deadline:
            return (
                f"small packets arrive, and those of {_read_packet_bytes(connection)} bytes don't: the MTU "
                f"of a network between the two must be that of the hosts"
            )
        time.sleep(_LOOK_SECONDS)
    return ""


def _read_packet_bytes(connection: socket.socket) -> int:
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    return 0


CONNECT_SECONDS = 5.0
_BEGUN_RECORD = b"\x16\x03\x01" + PROBE_BYTES.to_bytes(2, "big")
"""The beginning of a message of TLS, whose end a server awaits."""
_AT_ONCE = 32


def find_unreachable(members: Mapping[NodeId, Member], *, without: str = "") -> dict[str, str]:
    """Return why each agent can't be reached, of those that are alive. `without` is this agent's own node."""
    others = [m for node, m in members.items() if m.state in ("alive", "silent") and node != without]
    if not others:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(others))) as threads:
        reasons = list(threads.map(_try, others))
    return {str(m.facts.node): reason for m, reason in zip(others, reasons, strict=True) if reason}


def _try(member: Member) -> str:
    """Return why the server of an agent can't be spoken with; "" where it can."""
    facts = member.facts
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is compared as a whole
    context.set_alpn_protocols(["h2"])
    try:
        expected = ssl.PEM_cert_to_DER_cert(facts.certificate)
        with (
            contextlib.closing(connect_within(facts.address, facts.port, CONNECT_SECONDS)) as connection,
            context.wrap_socket(connection) as encrypted,
        ):
            why = (
                "" if encrypted.getpeercert(binary_form=True) == expected else "another program answers there"
            )
        if not why:
            data = _BEGUN_RECORD + bytes(PROBE_BYTES - 1)
            with contextlib.closing(connect_within(facts.address, facts.port, CONNECT_SECONDS)) as second:
                why = find_lost_packets(second, data, CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        why = str(getattr(error, "strerror", None) or error)
    return f"{format_address(facts.address, facts.port)}: {why}" if why else ""
