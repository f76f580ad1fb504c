"""Starts the head of a home, if it doesn't run."""

from __future__ import annotations

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.process.processes import ProcessIdentity
from insitu.cluster.wire import (
    change_head,
    choose_head_address,
    is_locked,
    read_head,
    resolve_interface,
    start_detached,
    wait_for_record,
)
from insitu.exchange import parse_address

_START_SECONDS = 60.0


def start_head(
    paths: Paths, interface: str, port: int, hosts: list[str], tied_to: ProcessIdentity | None = None
) -> str:
    """Return the address of the head of this home, which is started unless it runs.

    `interface` is that on which it listens; empty: one at which all `hosts` reach it. `port` 0: that of the
    last time. It ends with the process `tied_to`; None: what it is tied to stays.
    """
    address = _find_or_start_head(paths, interface, port, hosts)
    if tied_to is not None:
        change_head(paths, tied_to=(tied_to.pid, tied_to.start))
    return address


def _find_or_start_head(paths: Paths, interface: str, port: int, hosts: list[str]) -> str:
    record = read_head(paths)
    if record is not None and record.replaced_by and not paths.metadata_settings.exists():
        raise InputError(
            f"A cluster has one head. Received: {paths.home}, whose head the one at "
            f"{record.replaced_by} has replaced. Run the command on that machine. To give up this home, "
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


def start_elected_head(paths: Paths, host: str, won: str) -> str:
    """Start the head in the home of an agent, which has won the key of etcd. Returns its address. Raises
    ClusterError."""
    return _start_head(paths, host, 0, won)


def _start_head(paths: Paths, host: str, port: int, won: str = "") -> str:
    module, arguments = "insitu.cluster.nodes.head_process", [str(paths.home), host, str(port), won]
    answer = start_detached(paths, module, arguments, paths.head_log, _START_SECONDS)
    return str(answer["address"])
