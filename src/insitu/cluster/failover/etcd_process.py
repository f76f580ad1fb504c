"""Becomes a member of etcd: `python -P -m insitu.cluster.failover.etcd_process HOME BINARY READY`.

It takes the lock of the member and says so to READY. The program then has the same process, and holds the
lock until it ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from insitu.base.errors import ClusterError, InsituError
from insitu.base.paths import Paths
from insitu.cluster.failover.etcd_record import (
    CA,
    CERTIFICATE,
    DATA,
    KEY,
    LOCK,
    MemberRecord,
    list_environment,
    read_member,
)
from insitu.cluster.wire import report_ready, take_process_lock

_QUOTA_BYTES = 4 << 30
_HEARTBEAT_MS, _ELECTION_MS = 300, 3000
"""etcd's own are 100 and 1000: too short beside trainings that use all processors."""


def make_command(paths: Paths, record: MemberRecord, binary: str) -> list[str]:
    """Return the arguments that run a member."""
    client, peer = f"https://{record.client}", f"https://{record.peer}"
    ca, certificate, key = (str(paths.etcd_file(name)) for name in (CA, CERTIFICATE, KEY))
    options = {
        "name": record.name,
        "data-dir": str(paths.etcd_file(DATA)),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": record.peers,
        "initial-cluster-token": record.cluster,
        "initial-cluster-state": "new",
        "client-cert-auth": "true",
        "trusted-ca-file": ca,
        "cert-file": certificate,
        "key-file": key,
        "peer-client-cert-auth": "true",
        "peer-trusted-ca-file": ca,
        "peer-cert-file": certificate,
        "peer-key-file": key,
        # Else etcd refuses members that come from another address of their host. The token decides here.
        "experimental-peer-skip-client-san-verification": "true",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "1h",
        "quota-backend-bytes": str(_QUOTA_BYTES),
        "heartbeat-interval": str(_HEARTBEAT_MS),
        "election-timeout": str(_ELECTION_MS),
        "logger": "zap",
        "log-level": "warn",
        "log-outputs": "stderr",
    }
    return [binary, *(f"--{name}={value}" for name, value in options.items())]


def main(arguments: list[str]) -> int:
    paths, binary, ready = Paths(Path(arguments[0])), arguments[1], int(arguments[2])
    try:
        record = read_member(paths)
        lock = take_process_lock(paths.etcd_file(LOCK))
        if record is None or lock is None:
            raise ClusterError(f"A home has one member of etcd. Received: another process holds {paths.etcd}")
    except (InsituError, OSError) as error:
        report_ready(ready, {"error": str(error)})
        return 1
    os.set_inheritable(lock, True)
    report_ready(ready, {"started": True})
    os.execve(binary, make_command(paths, record, binary), list_environment())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
