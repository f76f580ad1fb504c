"""Ends a process when the one that started it ends, and tells it which replica of the script it is.

The parent hands down one end of a pipe. One line of JSON comes through it: the replica's number, the
addresses, and the secret. The pipe's end of file is the parent's end. The parent's side is
`insitu.train.devices.replica_processes`.
"""

from __future__ import annotations

import json
import os
import select
import stat
import threading
from dataclasses import dataclass, field

PARENT_PIPE_ENV = "INSITU_PARENT_PIPE"
"""`DESCRIPTOR:PID`: the pipe's descriptor here, and the parent. Removed from the environment when it is read,
so that this process' own children don't inherit it."""

_POLL_INTERVAL = 1.0
"""Seconds between two checks that the parent is alive, for the case that others hold its end of the pipe."""


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Which replica of the script a process is, and where the replicas meet."""

    replica: int
    """Its number, from 0."""
    devices: tuple[str, ...]
    """The devices' names, by replica."""
    addresses: tuple[str, ...]
    """`host:port`, by replica."""
    secret: bytes = field(repr=False)
    """What the replicas prove to each other."""

    def to_line(self) -> bytes:
        public = {"replica": self.replica, "devices": self.devices, "addresses": self.addresses}
        return json.dumps({**public, "secret": self.secret.hex()}).encode() + b"\n"


_identity: ReplicaIdentity | None = None


def replica_identity() -> ReplicaIdentity | None:
    """Return this process's identity, or None where nobody started it as a further replica."""
    return _identity


def exit_with_parent() -> None:
    """Read the identity from the parent's pipe, if there is one, and end with the parent from now on. Called
    when insitu is imported."""
    global _identity
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
    message = json.loads(line)
    _identity = ReplicaIdentity(
        message["replica"],
        tuple(message["devices"]),
        tuple(message["addresses"]),
        bytes.fromhex(message["secret"]),
    )
    threading.Thread(target=_exit_with, args=(pipe, int(parent)), daemon=True).start()


def _exit_with(pipe: int, parent: int) -> None:
    """End this process at once when its parent has gone."""
    while os.getppid() == parent:
        if select.select([pipe], [], [], _POLL_INTERVAL)[0] and not os.read(pipe, 1):
            break
    os._exit(1)
