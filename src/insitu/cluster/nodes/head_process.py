"""The process of a head.

`python -P -m insitu.cluster.nodes.head_process HOME HOST PORT WON READY`, started by `insitu up --hosts`, or
by an agent, which says in WON how it has won the key of the head (`leading.py`). READY is a descriptor to
which it writes one line of JSON once it listens, or why it can't.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from insitu.base.errors import ClusterError, InsituError
from insitu.base.net.ports import format_address
from insitu.base.paths import Paths
from insitu.base.process.process_log import start_logging
from insitu.cluster.failover import begin_to_lead, end_leading
from insitu.cluster.leases import REPLACED_EXIT_CODE
from insitu.cluster.nodes.head import Head
from insitu.cluster.nodes.head_files import HeadFiles, open_head_files
from insitu.cluster.nodes.hosts import check_head_home
from insitu.cluster.wire import (
    Acceptor,
    HeadRecord,
    check_record_owner,
    keep_log_bounded,
    make_token,
    open_listener,
    read_head,
    read_versions,
    report_ready,
    start_record,
    take_process_lock,
    write_head,
    write_token,
)
from insitu.exchange import PeerInfo
from insitu.metadata import read_settings

logger = logging.getLogger("insitu")


def open_head(paths: Paths, host: str, port: int, won: str) -> Head:
    """Return the head of this home, which listens. Raises InsituError, OSError."""
    listener = open_listener(host, port)
    address = format_address(host, listener.getsockname()[1])
    settings, token = read_settings(paths), make_token(paths)
    if settings is None:
        record, lead = start_record(paths, address), None
        files = open_head_files(paths, record, token)
    else:
        record, lead = begin_to_lead(paths, settings, address, won)
        files = HeadFiles(lead.make_store(), token, record.epoch)
    info: PeerInfo = {
        "room": "agents",
        "role": "head",
        "versions": read_versions(),
        **{k: v for k, v in asdict(record).items() if k in ("cluster", "epoch", "instance")},
    }
    return Head(paths, Acceptor(listener, token, info), record, files, lead)


def run_head(paths: Paths, host: str, port: int, token: str, report: Callable[[str], None]) -> int:
    """Be the head of this home in this process until a signal ends it, as a scheduler starts it.

    It listens at a numeric address of this machine, which `report` gets. Returns the exit code. Raises
    InsituError if it can't begin.
    """
    check_record_owner(paths)
    check_head_home(paths)
    write_token(paths, token)
    return _serve(paths, host, port, "", report)


def _serve(paths: Paths, host: str, port: int, won: str, report: Callable[[str], None]) -> int:
    start_logging()
    lock = take_process_lock(paths.head_lock)
    if lock is None:
        raise ClusterError(f"A home has one head. Received: another process holds {paths.head_lock}")
    head = open_head(paths, host, port, won)
    record = head.record
    report(record.address)
    logger.info("listens at %s, epoch %d", record.address, record.epoch)
    keep_log_bounded(paths.head_log)
    is_replaced = False
    try:
        head.serve()
    finally:
        found = read_head(paths)
        if found is not None and found.instance == record.instance:
            write_head(paths, HeadRecord(**{**asdict(found), "pid": 0, "start": 0}))
        if head.lead is not None:
            is_replaced = end_leading(paths, head.lead, down=head.went_down)
        os.close(lock)
    return REPLACED_EXIT_CODE if is_replaced or (found is not None and found.replaced_by) else 0


def main(arguments: list[str]) -> int:
    paths, (host, port, won) = Paths(Path(arguments[0])), arguments[1:4]
    ready = [int(arguments[4])]

    def report(address: str) -> None:
        report_ready(ready.pop(), {"address": address})

    try:
        return _serve(paths, host, int(port), won, report)
    except (InsituError, OSError) as error:
        if not ready:
            raise
        report_ready(ready.pop(), {"error": str(error)})
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
