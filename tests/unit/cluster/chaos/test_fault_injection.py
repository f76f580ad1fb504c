"""What chaos does from outside really happens to the process that it is done to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError
from insitu.cluster.chaos.injector import (
    blackhole_connections,
    drop_connections,
    find_connections,
    simulate_full_disk,
)

PROGRAM = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(b"up")
for line in sys.stdin:
    try:
        with open(sys.argv[2], "a") as file:
            file.write(line)
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""
World = tuple["subprocess.Popen[str]", socket.socket]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A process and this end of its one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        command = [sys.executable, "-c", PROGRAM, str(server.getsockname()[1]), str(tmp_path / "file")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(30)
                assert connection.recv(2) == b"up"
                try:
                    yield process, connection
                finally:
                    process.kill()


def unsent(connection: socket.socket) -> int:
    """Bytes that were sent and not acknowledged (SIOCOUTQ)."""
    import array
    import fcntl

    count = array.array("i", [0])
    fcntl.ioctl(connection, 0x5411, count)
    return count[0]


def test_dropped_connections_end_on_both_sides(world: World) -> None:
    process, connection = world
    assert len(find_connections(process.pid)) == 1
    try:
        assert drop_connections(process.pid) == 1
    except ClusterError as error:
        pytest.skip(str(error))
    assert connection.recv(1) == b""
    with pytest.raises(ClusterError, match="no TCP connection"):
        drop_connections(process.pid)


def test_deaf_connections_stay_open_and_nothing_arrives(world: World) -> None:
    process, connection = world
    try:
        assert blackhole_connections(process.pid) == 1
    except (ClusterError, PermissionError) as error:  # a system may keep packet filters from users
        pytest.skip(str(error))
    connection.sendall(b"lost")
    assert unsent(connection) == 4
    assert process.poll() is None and len(find_connections(process.pid)) == 1


def test_a_full_disk_is_full_for_that_process_alone_and_only_meanwhile(world: World, tmp_path: Path) -> None:
    process, _ = world
    assert process.stdin is not None and process.stdout is not None

    def write() -> str:
        print("x", file=process.stdin, flush=True)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    with simulate_full_disk([process.pid]):
        assert write() == os.strerror(27)
        (tmp_path / "other").write_text("x")
    assert write() == "written"
