"""Ends a process that runs a further replica of a script together with the process that started it.

The parent hands down one end of a pipe. A line of JSON comes through it, with the replica's number and the
secret, which must not stand in the environment; end of file means that the parent has ended. The parent's
side is `insitu.train.devices.replica_processes`.
"""

from __future__ import annotations

import json
import os
import select
import stat
import threading
from dataclasses import dataclass, field

PARENT_PIPE_ENV = "INSITU_PARENT_PIPE"
"""`DESCRIPTOR:PID`: the pipe's descriptor here, and the parent. Removed from the environment when read, so
that it doesn't reach processes that this one starts."""

_POLL_INTERVAL = 1.0
"""Seconds between two checks that the parent is there, should other processes hold its end of the pipe."""


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """The configuration of a further replica, which its parent sends."""

    #: Its number.
    replica: int
    #: The devices of all replicas, by number.
    devices: tuple[str, ...]
    #: The addresses of all replicas, by number.
    addresses: tuple[str, ...]
    #: The secret that the replicas prove to each other.
    secret: bytes = field(repr=False)
    """What the replicas prove to each other."""

    def to_line(self) -> bytes:
        fields = {"replica": self.replica, "devices": self.devices, "addresses": self.addresses}
        return json.dumps({**fields, "secret": self.secret.hex()}).encode() + b"\n"


_replica_config: ReplicaConfig | None = None


def get_replica_config() -> ReplicaConfig | None:
    """Return this process's configuration; None where it wasn't started as a further replica."""
    return _replica_config


def tie_to_parent() -> None:
    """End this process together with the parent that started it as a further replica, if one did.

    Called when insitu is imported.
    """
    global _replica_config
    descriptor, _, parent = os.environ.pop(PARENT_PIPE_ENV, "").partition(":")
    if not descriptor:
        return
    pipe = int(descriptor)
    if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
        return
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(pipe, 65536)
        if not read:
            os._exit(1)
        line += read
    fields = json.loads(line)
    _replica_config = ReplicaConfig(
        fields["replica"],
        tuple(fields["devices"]),
        tuple(fields["addresses"]),
        bytes.fromhex(fields["secret"]),
    )
    threading.Thread(target=_end_with, args=(pipe, int(parent)), daemon=True).start()


def _end_with(pipe: int, parent: int) -> None:
    """End this process, whatever it is about to do, once its parent has ended."""
    while os.getppid() == parent:
        if select.select([pipe], [], [], _POLL_INTERVAL)[0] and not os.read(pipe, 1):
            break
    os._exit(1)
