"""Servers of partitions in this process and in others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from insitu.base.net.certificates import Certificate, make_certificate
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid.serving import PartitionServer
from insitu.grid.transfer import ServerAddress

SECRET = b"a secret that nobody can guess.."
_CERTIFICATE: list[Certificate] = []


def certificate() -> Certificate:
    """A certificate for all servers of this process: making one takes a while."""
    if not _CERTIFICATE:
        _CERTIFICATE.append(make_certificate())
    return _CERTIFICATE[0]


class ServerProcess:
    """A process that serves the store of a node."""

    def __init__(self, paths: Paths, node: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(paths.home), node],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        )
        assert self._process.stdout is not None
        found = json.loads(self._process.stdout.readline())
        self.address = ServerAddress(**found)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(60)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the process and wait until it has."""
        self._process.kill()
        self._process.wait(60)


def main() -> None:
    """Serve until the standard input ends."""
    paths, node = Paths(Path(sys.argv[1])), NodeId(sys.argv[2])
    server = PartitionServer(paths, node, SECRET, make_certificate())
    address = server.address
    found = {"host": address.host, "port": address.port, "certificate": address.certificate}
    print(json.dumps(found), flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
