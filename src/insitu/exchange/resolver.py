"""Looks up the addresses of hosts in threads of their own, so that a slow name server stops nobody's
waiting. `Resolver` is for loops, `resolve` for those who may wait until a deadline."""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

_RETRY_INTERVAL = 1.0
"""Seconds between two look-ups of a name that isn't known."""


@dataclass(frozen=True, slots=True)
class Address:
    """One address of a host, with a port."""

    #: AF_INET or AF_INET6.
    family: socket.AddressFamily
    #: The argument of `socket.connect`.
    address: Any

    @property
    def is_loopback(self) -> bool:
        """True if only this host can reach it."""
        return ipaddress.ip_address(self.address[0].partition("%")[0]).is_loopback


class Resolver:
    """Finds the addresses of hosts without waiting for them. Not for several threads."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[Address]] = {}
        self._failures: dict[str, str] = {}
        self._running: dict[tuple[str, int], threading.Thread] = {}
        self._retry_at: dict[tuple[str, int], float] = {}

    def find(self, host: str, port: int) -> list[Address]:
        """Return the addresses of `host`; none while they are looked up, or if it isn't known."""
        key = host, port
        if key in self._found:
            return self._found[key]
        try:
            return self._keep(key, socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            pass  # a name
        thread = self._running.get(key)
        if (thread is None or not thread.is_alive()) and time.monotonic() >= self._retry_at.get(key, 0.0):
            self._retry_at[key] = time.monotonic() + _RETRY_INTERVAL
            self._running[key] = threading.Thread(target=self._look_up, args=(key,), daemon=True)
            self._running[key].start()
        return []

    def get_failure(self, host: str) -> str:
        """Return why a host isn't known; empty if nothing is known about that."""
        return self._failures.get(host, "")

    def _look_up(self, key: tuple[str, int]) -> None:
        try:
            self._keep(key, 0)
        except OSError as error:
            self._failures[key[0]] = error.strerror or str(error)
        except UnicodeError as error:
            self._failures[key[0]] = str(error)

    def _keep(self, key: tuple[str, int], flags: int) -> list[Address]:
        found = self._found[key] = _list_addresses(key, flags)
        return found


class _LookUp:
    """One look-up in a thread, which may outlive those who wait for it."""

    def __init__(self, key: tuple[str, int]) -> None:
        self._key = key
        #: Set once one of the two below is.
        self.done = threading.Event()
        #: The addresses.
        self.found: list[Address] = []
        #: Why there are none.
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            self.found = _list_addresses(self._key, 0)
        except OSError as error:
            self.error = error
        except UnicodeError as error:
            self.error = OSError(errno.EINVAL, str(error))
        finally:
            with _look_ups_lock:
                _look_ups.pop(self._key, None)
            self.done.set()


_look_ups: dict[tuple[str, int], _LookUp] = {}
"""Look-ups under way: a name server that hangs costs one thread for each name, however often it is asked."""
_look_ups_lock = threading.Lock()


def resolve(host: str, port: int, seconds: float) -> list[Address]:
    """Return the addresses of `host`. Raises OSError if it isn't known, or isn't after `seconds`."""
    key = host, port
    try:
        return _list_addresses(key, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        pass  # a name
    with _look_ups_lock:
        look_up = _look_ups.get(key)
        if look_up is None:
            look_up = _look_ups[key] = _LookUp(key)
            threading.Thread(target=look_up.run, name="resolver", daemon=True).start()
    if not look_up.done.wait(seconds):
        raise TimeoutError(errno.ETIMEDOUT, f"no name server has said within {seconds:g} s where {host} is")
    if look_up.error is not None:
        raise look_up.error
    return look_up.found


def connect_within(host: str, port: int, seconds: float) -> socket.socket:
    """Return a connection to `host`. Its name, and each of its addresses, has `seconds` to answer.

    Raises OSError: that of the last address.
    """
    failure: OSError = OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    for each in resolve(host, port, seconds):
        connection = socket.socket(each.family, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(each.address)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


def _list_addresses(key: tuple[str, int], flags: int) -> list[Address]:
    listed = socket.getaddrinfo(*key, type=socket.SOCK_STREAM, flags=flags)
    return [Address(family, address) for family, _, _, _, address in listed]
