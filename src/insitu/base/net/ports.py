"""Ports for tasks to listen on.

A task opens its port only seconds after it was given the number, when its framework has been loaded. So who
chooses a port binds it at once, and hands the bound socket to the task, which listens on it (`LISTENER_ENV`):
nobody can take the port meanwhile. Ports are drawn from outside the system's ephemeral range, where nothing
appears unasked.

Some can't take a socket: TensorFlow's gRPC, and programs whose parents close what they inherit. They listen
beside the bound socket, which needs SO_REUSEPORT on both, and the same user: the kernel refuses all others.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import socket
import stat
from pathlib import Path

from insitu.base.errors import ClusterError

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _HIGHEST = 15_000, 65_000
_TRIES = 200
_BRIDGES = ("docker", "br-", "virbr", "cni", "podman", "lxc", "lxd")
"""How the names of bridges begin that programs make for their containers."""
LISTENER_ENV = "INSITU_LISTENER"
"""`DESCRIPTOR:HOST:PORT` of a bound socket that a process was given. Without the descriptor once it has been
taken over: processes that this one starts don't get it."""
_inherited: dict[tuple[str, int], socket.socket] = {}
"""Bound sockets that this process was given, by (host, port). They stay open, and so the ports stay taken."""


def format_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around a number of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def candidate_ports(ephemeral: tuple[int, int]) -> range:
    """Return the longer range of ports in [15000, 65000) outside the ephemeral range; maybe empty."""
    below = range(_LOWEST, max(_LOWEST, min(ephemeral[0], _HIGHEST)))
    above = range(min(_HIGHEST, max(ephemeral[1] + 1, _LOWEST)), _HIGHEST)
    return max(below, above, key=len)


def hold_port(host: str) -> socket.socket:
    """Bind a socket to a free port of `host`; closing it frees the port at once. Raises ClusterError."""
    try:
        low, high = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        low, high = 1, 65_535
    candidates = candidate_ports((low, high))
    chooser = random.SystemRandom()
    for _ in range(_TRIES):
        port = chooser.choice(candidates) if len(candidates) >= 1000 else _ask_for_port(host)
        held = socket.socket(_family_of(host), socket.SOCK_STREAM)
        try:
            held.bind((host, port))
            # After the bind, which must fail if another socket of this user has the port.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError as error:
            held.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise ClusterError(
                f"Can't bind a port of {host}: {error}. Tasks listen there: allow it, or give the host that "
                "address"
            ) from error
        return held
    raise ClusterError(
        f"No free port was found on {host} in {_TRIES} tries. End programs that hold ports, or wait a minute "
        "for those that have just ended"
    )


def _family_of(host: str) -> socket.AddressFamily:
    """Return the family of a numeric address, or IPv4 for a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _ask_for_port(host: str) -> int:
    """Return a free port that the system chose; 0 if it gives none. A socket that is bound to 0 itself would
    lose its port when it stops listening."""
    with contextlib.suppress(OSError), socket.socket(_family_of(host), socket.SOCK_STREAM) as asking:
        asking.bind((host, 0))
        return int(asking.getsockname()[1])
    return 0


def describe_listener(held: socket.socket) -> str:
    """Return the value of LISTENER_ENV for a process that gets `held` by the same descriptor."""
    host, port = held.getsockname()[:2]
    return f"{held.fileno()}:{host}:{port}"


def take_inherited(host: str, port: int) -> socket.socket | None:
    """Return a socket that is bound to (host, port) and was handed to this process; None if there is none.

    No other socket can be bound there then. The port stays bound when the caller closes the socket: shut
    down, it listens no more, and the next call returns it again. Raises OSError if the socket was handed to a
    process above this one, which listens on it.
    """
    adopt_inherited()
    held = _inherited.get((host, port))
    if held is not None:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        # Connections of its last time may linger for a minute. Those have the option, too: they got it from
        # the socket that accepted them. While it doesn't listen, the option would let anybody bind the port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held.dup()
    if os.environ.get(LISTENER_ENV, "").partition(":")[2] == f"{host}:{port}":
        return _bind_beside(host, port)
    return None


def stop_listening(listener: socket.socket) -> None:
    """Have callers refused. A socket that was handed down stays bound, so that nobody else can bind its
    port."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def adopt_inherited() -> None:
    """Take over the socket that LISTENER_ENV names, so that no process that this one starts gets it."""
    descriptor, _, address = os.environ.get(LISTENER_ENV, "").partition(":")
    if descriptor:
        os.environ[LISTENER_ENV] = f":{address}"
    if descriptor.isdecimal():
        adopt_listener(int(descriptor), address)


def adopt_listener(descriptor: int, address: str) -> None:
    """Keep the socket `descriptor`, which is bound to `address`. Leave anything else alone: numbers of
    descriptors are used again."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return
        held = socket.socket(fileno=os.dup(descriptor))
        if held.type != socket.SOCK_STREAM or held.family not in (socket.AF_INET, socket.AF_INET6):
            held.close()
            return
        host, port = held.getsockname()[:2]
        if f"{host}:{port}" != address:
            held.close()
            return
        os.close(descriptor)
        os.set_inheritable(held.fileno(), False)
        _inherited[host, port] = held


def _bind_beside(host: str, port: int) -> socket.socket:
    """Return a socket that is bound beside the one that another process of this user holds. Raises OSError if
    that one is used."""
    beside = socket.socket(_family_of(host), socket.SOCK_STREAM)
    try:
        beside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        beside.bind((host, port))
    except OSError:
        beside.close()
        raise
    return beside


def list_host_addresses() -> list[str]:
    """Return the addresses of this host's interfaces, and its name: those by which others may know it.

    Loopback and link-local addresses are left out, and those of bridges for containers: many hosts have the
    same.
    """
    import psutil

    found = {socket.gethostname()}
    for name, addresses in psutil.net_if_addrs().items():
        for each in () if name.startswith(_BRIDGES) else addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                number = ipaddress.ip_address(each.address.partition("%")[0])
                if not (number.is_loopback or number.is_link_local):
                    found.add(str(number))
    return sorted(found)
