"""Refuses connections without authentication between hosts, unless the user has asked for them.

Libraries that insitu can't put a secret into (JAX' coordinator, gloo, TensorFlow's gRPC) let in everybody who
reaches their port, and send in plain text. On the loopback interface these are the users of this machine;
anywhere else everybody on the network.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Mapping

from insitu.base.errors import InputError

ALLOW_UNAUTHENTICATED_ENV = "INSITU_ALLOW_UNAUTHENTICATED"
"""`1` if the user has asked for it, as `insitu start --allow-unauthenticated` sets it."""


def is_loopback(address: str) -> bool:
    """Return whether `host:port`, or a host alone, is on the loopback interface."""
    host = address
    if address.startswith("["):
        host = address[1:].partition("]")[0]
    elif address.count(":") == 1:
        host = address.partition(":")[0]
    if host == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
        # An IPv6 socket that takes IPv4 callers, too, names them by such addresses.
        return (getattr(found, "ipv4_mapped", None) or found).is_loopback
    except ValueError:
        # A name may mean anything, and something else tomorrow.
        return False


def find_open(addresses: Iterable[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the addresses that aren't on the loopback interface, unless the user has allowed them."""
    if environ.get(ALLOW_UNAUTHENTICATED_ENV) == "1":
        return []
    return [address for address in addresses if not is_loopback(address)]


def refuse_unauthenticated(
    what: str, instead: str, addresses: Iterable[str], environ: Mapping[str, str] = os.environ
) -> None:
    """Raise InputError if `what` would connect processes at `addresses` that aren't on the loopback.

    `instead` says what to use for it.
    """
    open_ones = find_open(addresses, environ)
    if open_ones:
        raise InputError(
            f"{what} has no authentication and no encryption: everybody who reaches its ports can take part "
            f"in the training and read it. Received: {', '.join(open_ones[:3])}, outside of the loopback "
            f"interface. {instead}, or, on a network that you trust, give `insitu start "
            f"--allow-unauthenticated` or set {ALLOW_UNAUTHENTICATED_ENV}=1 in each task"
        )
