"""Starts the head of a home, where it doesn't run."""

from __future__ import annotations

from insitu.cluster.agents.addresses import choose_head_address, resolve_interface
from insitu.cluster.agents.detached import start_detached
from insitu.cluster.agents.node_list import wait_for_record
from insitu.cluster.agents.records import change_head, is_locked, read_head
from insitu.errors import ClusterError, InputError
from insitu.exchange import parse_address
from insitu.paths import Paths
from insitu.processes import ProcessIdentity

_START_SECONDS = 60.0


def start_head(
    paths: Paths, interface: str, port: int, hosts: list[str], tied_to: ProcessIdentity | None = None
) -> str:
    """Return the address of the head of this home, which is started unless it runs.

    `interface` is where it listens; empty: where all `hosts` reach it. `port` 0: that of the last time. It
    ends with the process `tied_to`; None: what it is tied to stays.
    """
    address = _find_or_start_head(paths, interface, port, hosts)
    if tied_to is not None:
        change_head(paths, tied_to=(tied_to.pid, tied_to.start))
    return address


def _find_or_start_head(paths: Paths, interface: str, port: int, hosts: list[str]) -> str:
    record = read_head(paths)
    if record is not None and record.successor:
        raise InputError(
            f"A cluster has one head. Received: {paths.home}, whose head was lost: the one at "
            f"{record.successor} has taken over. Run the command on that machine. To give up this home, "
            f"delete {paths.head}"
        )
    host = resolve_interface(interface) if interface else ""
    if is_locked(paths.head_lock):
        record = wait_for_record(paths)
        found = parse_address(record.address)
        if (host and host != found[0]) or (port and port != found[1]):
            raise InputError(
                f"A home has one head. Received: another address than {record.address}, where it runs. End "
                f"it first with `insitu down`, or leave out --interface and --port"
            )
        return record.address
    host = host or choose_head_address(hosts)
    wanted = port
    if not port and record is not None and record.address and parse_address(record.address)[0] == host:
        port = parse_address(record.address)[1]  # where agents that are still there look for it
    try:
        return _start_head(paths, host, port)
    except ClusterError:
        if wanted or not port:
            raise
    return _start_head(paths, host, 0)


def _start_head(paths: Paths, host: str, port: int) -> str:
    arguments = [str(paths.home), host, str(port)]
    answer = start_detached(paths, "insitu.cluster.agents.head", arguments, paths.head_log, _START_SECONDS)
    return str(answer["address"])
