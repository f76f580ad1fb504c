"""What ties a process to the one that started it as a further replica of the same script.

The starter hands down one end of a pipe: through it comes a line of JSON with who the process is and what it
must not say aloud, and its end of file is the starter's end. The other side is
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
"""`DESCRIPTOR:PID`: the pipe's descriptor here, and the starter. Taken out of the environment when read, so
that it doesn't reach processes that this one starts."""

_POLL_INTERVAL = 1.0
"""Seconds between two looks whether the starter is still there, should others hold its end of the pipe."""


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """What a further replica is told: its number, the devices of all by number, where they meet."""

    replica: int
    devices: tuple[str, ...]
    addresses: tuple[str, ...]
    secret: bytes = field(repr=False)

    def to_line(self) -> bytes:
        fields = {"replica": self.replica, "devices": self.devices, "addresses": self.addresses}
        return json.dumps({**fields, "secret": self.secret.hex()}).encode() + b"\n"


_replica_config: ReplicaConfig | None = None


def get_replica_config() -> ReplicaConfig | None:
    """What this process was told; None where nobody started it as a further replica."""
    return _replica_config


def tie_to_parent() -> None:
    """From now on this process ends with its starter, if it has one. Called when insitu is imported."""
    global _replica_config
    descriptor, _, starter = os.environ.pop(PARENT_PIPE_ENV, "").partition(":")
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
    threading.Thread(target=_end_with, args=(pipe, int(starter)), daemon=True).start()


def _end_with(pipe: int, starter: int) -> None:
    """Ends this process, whatever it is about to do, once its starter has gone."""
    while os.getppid() == starter:
        if select.select([pipe], [], [], _POLL_INTERVAL)[0] and not os.read(pipe, 1):
            break
    os._exit(1)
