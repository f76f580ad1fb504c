"""Says whether another host of a job can be reached from here, and lets those reach this one."""

from __future__ import annotations

import contextlib
import queue
import threading

from insitu.exchange import connect_within, parse_address
from insitu.ports import format_address, hold_port

LOOK_SECONDS = 2.0
"""Seconds in which the system of another host answers. Longer ones come too late to matter."""
_BACKLOG = 16


class HostWitness:
    """Owned by the server of one host. The *door* is a port at which nothing is read: that its system answers
    is all that others want to know. Raises ClusterError where there is no port for it."""

    def __init__(self, host: str) -> None:
        self._door = hold_port(host)
        self._door.setblocking(False)
        self._door.listen(_BACKLOG)
        #: Where others try to reach this host.
        self.address = format_address(host, self._door.getsockname()[1])
        self._under_way: set[str] = set()
        self._reached: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()

    def look(self, node: str, address: str) -> None:
        """Try to reach the door of `node`; `take_seen` says how that went. One that is tried already isn't
        tried twice."""
        if node not in self._under_way:
            self._under_way.add(node)
            threading.Thread(target=self._try, args=(node, address), daemon=True).start()

    def _try(self, node: str, address: str) -> None:
        try:
            with contextlib.closing(connect_within(*parse_address(address), LOOK_SECONDS)):
                self._reached.put((node, True))
        except ConnectionRefusedError:
            self._reached.put((node, True))  # its system lives, and says so
        except Exception:
            self._reached.put((node, False))

    def take_seen(self) -> list[str]:
        """Return the nodes that have been reached since the last call. Callers at the door are let go."""
        with contextlib.suppress(OSError):
            while True:
                self._door.accept()[0].close()
        seen = []
        with contextlib.suppress(queue.Empty):
            while True:
                node, is_there = self._reached.get_nowait()
                self._under_way.discard(node)
                if is_there:
                    seen.append(node)
        return seen

    def close(self) -> None:
        """Close the door."""
        self._door.close()
