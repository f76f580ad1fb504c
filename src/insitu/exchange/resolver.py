"""Looks up the addresses of hosts in threads of their own, so that a slow name server stops nobody's
waiting."""

from __future__ import annotations

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
    #: What `socket.connect` takes.
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
        """Return why a host isn't known; empty where nothing is known about that."""
        return self._failures.get(host, "")

    def _look_up(self, key: tuple[str, int]) -> None:
        try:
            self._keep(key, 0)
        except OSError as error:
            self._failures[key[0]] = error.strerror or str(error)
        except UnicodeError as error:
            self._failures[key[0]] = str(error)

    def _keep(self, key: tuple[str, int], flags: int) -> list[Address]:
        listed = socket.getaddrinfo(*key, type=socket.SOCK_STREAM, flags=flags)
        found = [Address(family, address) for family, _, _, _, address in listed]
        self._found[key] = found
        return found
