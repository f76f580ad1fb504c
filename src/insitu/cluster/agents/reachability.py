"""Finds the agents that this machine can't reach, before something waits for them."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from insitu.cluster.agents.packet_sizes import PROBE_BYTES, find_lost_packets
from insitu.cluster.decide import Member
from insitu.exchange import connect_within
from insitu.ports import format_address
from insitu.spec import NodeId

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
