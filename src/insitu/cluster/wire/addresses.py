"""Chooses the address of this machine that others reach it by."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from insitu.base.errors import InputError
from insitu.base.net.unauthenticated import is_loopback
from insitu.exchange import resolve

_LOOK_UP_SECONDS = 10.0
_ANY_PORT = 9
"""Nothing is sent there: the system only chooses the route."""


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET


def find_route_source(host: str) -> str:
    """Return this machine's numeric address on the way to `host`. Raises OSError if there is no way."""
    failure: OSError = OSError(f"{host} has no address")
    for target in resolve(host, _ANY_PORT, _LOOK_UP_SECONDS):
        try:
            with socket.socket(target.family, socket.SOCK_DGRAM) as asking:
                asking.connect(target.address)
                return str(asking.getsockname()[0])
        except OSError as error:
            failure = error
    raise failure


def choose_head_address(hosts: Iterable[str]) -> str:
    """Return the address of this machine by which all `hosts` reach it.

    Raises InputError if it can't be found out, or where there are several.
    """
    sources: dict[str, str] = {}
    failures = []
    for host in hosts:
        try:
            sources[find_route_source(host)] = host
        except OSError as error:
            failures.append(f"{host} ({error.strerror or error})")
    remote = {source: host for source, host in sources.items() if not is_loopback(source)} or sources
    if len(remote) == 1:
        return next(iter(remote))
    received = (
        f"no route to {', '.join(failures)}"
        if not remote
        else ", ".join(f"{source} on the way to {host}" for source, host in sorted(remote.items()))
    )
    raise InputError(
        f"The head listens on one address, which all hosts reach. Received: {received}. Name it by "
        f"--interface"
    )


def resolve_interface(text: str, family: socket.AddressFamily | None = None) -> str:
    """Return the numeric address that `--interface TEXT` means: an address, or the name of an interface.

    `family`: the address must be of it. Raises InputError if this machine doesn't have it.
    """
    import psutil

    interfaces = {
        name: [found.address for found in addresses if _is_usable(found, family)]
        for name, addresses in psutil.net_if_addrs().items()
    }
    if interfaces.get(text):
        return str(interfaces[text][0])
    own = [address for addresses in interfaces.values() for address in addresses]
    try:
        wanted = ipaddress.ip_address(text)
    except ValueError:
        wanted = None
    if wanted is not None and any(ipaddress.ip_address(address) == wanted for address in own):
        return str(wanted)
    listed = ", ".join(f"{name} ({', '.join(found)})" for name, found in interfaces.items() if found)
    raise InputError(
        f"--interface names an interface of this machine, or an address of one. Received: {text}. There are: "
        f"{listed}"
    )


def _is_usable(found: object, family: socket.AddressFamily | None) -> bool:
    kind, address = getattr(found, "family", None), str(getattr(found, "address", ""))
    if kind not in (socket.AF_INET, socket.AF_INET6) or family not in (None, kind):
        return False
    return not ipaddress.ip_address(address.partition("%")[0]).is_link_local
