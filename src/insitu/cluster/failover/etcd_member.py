"""A member of an etcd that insitu runs itself, in the home of an agent.

`insitu up --metadata etcd` has hosts draw name and ports (`prepare_member`), and starts all members with what
each has drawn (`start_member`). The agent starts its member again if that ends (`MemberKeeper`). A member
outlives the agent, which others need less.

Connections of members and clients are TLS, and both sides show certificates of an authority that follows from
the cluster's token: who doesn't know that can't connect.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from insitu.base.disk.access import PRIVATE_FILE
from insitu.base.disk.durable import replace_file
from insitu.base.errors import ClusterError, InputError, InsituError
from insitu.base.net.certificates import Credentials, make_credentials
from insitu.base.net.ports import format_address, hold_port
from insitu.base.paths import Paths
from insitu.cluster.failover.etcd_record import (
    CA,
    CERTIFICATE,
    DATA,
    KEY,
    LOCK,
    LOG,
    MemberRecord,
    list_environment,
    read_member,
    write_member,
)
from insitu.cluster.job_files import rotated_path
from insitu.cluster.job_hosts import end_process
from insitu.cluster.wire import (
    MAX_LOG_BYTES,
    check_token,
    find_route_source,
    is_locked,
    open_holder,
    read_holder,
    resolve_interface,
    start_detached,
)
from insitu.exchange import parse_address
from insitu.metadata import read_settings

logger = logging.getLogger("insitu")
BINARY_ENV = "INSITU_ETCD"
"""The variable that names the binary of etcd on a host."""
_OLDEST = (3, 4)
_ASK_SECONDS, _START_SECONDS, _LISTEN_SECONDS = 10.0, 30.0, 30.0
_LOOK_SECONDS = 0.1
_END_SECONDS = 3.0
"""A leader waits longer, for one that ends, too. Changes that it has acknowledged are on its disk."""
_KEEP_SECONDS = (1.0, 60.0)
"""Between two looks at the member; the longest pause after it has ended again and again."""


def make_etcd_credentials(cluster: str, token: str, addresses: tuple[str, ...] = ()) -> Credentials:
    """Return the authority of a cluster's etcd, and a new certificate for a client, or for a member at
    `addresses`."""
    return make_credentials(f"etcd {cluster} {token}".encode(), addresses)


def find_binary() -> str:
    """Return the path of etcd on this host. Raises InputError if there is none, or an old one."""
    named = os.environ.get(BINARY_ENV, "")
    found = shutil.which(named or "etcd")
    if found is None:
        raise InputError(
            f"insitu starts etcd {_OLDEST[0]}.{_OLDEST[1]} or newer on this host. Received: "
            f"{f'{BINARY_ENV}={named}, which is no program' if named else 'no etcd on PATH'}. Install it, "
            f"such as Debian's etcd-server, or name its binary by {BINARY_ENV} (--insitu 'env "
            f"{BINARY_ENV}=/opt/etcd/etcd insitu')"
        )
    try:
        asked = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=_ASK_SECONDS, env=list_environment()
        )
        said = asked.stdout or asked.stderr
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        said = str(error)
    version = re.search(r"etcd Version: (\d+)\.(\d+)", said)
    if version is None or (int(version[1]), int(version[2])) < _OLDEST:
        raise InputError(
            f"insitu starts etcd {_OLDEST[0]}.{_OLDEST[1]} or newer. Received: {found}, which says "
            f"{said.strip()[:100]!r}. Install a newer one, or name another binary by {BINARY_ENV}"
        )
    return os.path.abspath(found)


def do_about_member(
    paths: Paths, what: str, head: str, interface: str, given: Sequence[str]
) -> dict[str, Any]:
    """Do what `insitu up` asks of a host by `insitu agent --member`. `given`: the lines of its input, for one
    that starts the token and an order. Raises InsituError."""
    if what == "prepare":
        return prepare_member(paths, resolve_interface(interface) if interface else find_route_source(head))
    if what == "stop":
        stop_member(paths, delete=False)
        return {}
    if what != "start":
        raise InputError(f"A member of etcd is prepared, started or stopped. Received: {what}")
    return start_member(paths, check_token(given[0].strip()), json.loads(given[1]))


def stop_member(paths: Paths, *, delete: bool) -> None:
    """End the member of this home, if it runs on this host; `delete`: its data goes. Raises InputError."""
    holder = read_holder(paths.etcd_file(LOCK))
    process = open_holder(holder) if holder is not None and holder.is_here else None
    if process is not None:
        try:
            end_process(process, _END_SECONDS)
        finally:
            os.close(process)
    if delete:
        shutil.rmtree(paths.etcd, ignore_errors=True)


def prepare_member(paths: Paths, host: str) -> dict[str, str]:
    """Draw name and ports of a member that serves at `host`, unless this home has one. Returns its record.
    Raises InputError, ClusterError."""
    find_binary()
    record = read_member(paths)
    if record is None or (not record.cluster and parse_address(record.client)[0] != host):
        with hold_port(host) as client, hold_port(host) as peer:
            client_at, peer_at = (format_address(host, each.getsockname()[1]) for each in (client, peer))
        record = MemberRecord(os.urandom(8).hex(), client_at, peer_at)
        write_member(paths, record)
    return asdict(record)


def start_member(paths: Paths, token: str, order: Mapping[str, Any]) -> dict[str, str]:
    """Start this home's member as the head's machine says it. Returns its addresses; {}: there is none.

    A member that has lost its data isn't started again: the others would take its votes for the earlier ones.
    Raises InputError, ClusterError.
    """
    record = read_member(paths)
    cluster, peers = str(order["cluster"]), str(order["peers"])
    if record is None or f"{record.name}=" not in peers:
        return {}
    if record.cluster not in ("", cluster):
        raise InputError(
            f"A member of etcd belongs to one cluster. Received: cluster {cluster[:8]}, and {paths.etcd} of "
            f"cluster {record.cluster[:8]}. Remove that folder if that cluster is given up"
        )
    if record.peers != peers:
        record = replace(record, cluster=cluster, peers=peers)
        write_member(paths, record)
    if not is_locked(paths.etcd_file(LOCK)):
        _launch(paths, record, token, is_new=order.get("new") is True)
    _wait_until_it_listens(paths, record)
    return {"etcd": record.client}


def _launch(paths: Paths, record: MemberRecord, token: str, *, is_new: bool) -> None:
    if not is_new and not (paths.etcd_file(DATA) / "member").is_dir():
        raise ClusterError(
            f"A member of etcd needs its data. Received: none in {paths.etcd_file(DATA)}. The others "
            f"continue "
            f"without it. Restore the folder, or replace the member by `etcdctl member remove` and `add`"
        )
    host = parse_address(record.client)[0]
    made = make_etcd_credentials(record.cluster, token, (host,))
    for name, text in ((CA, made.authority), (CERTIFICATE, made.own.pem), (KEY, made.own.key_pem)):
        replace_file(paths.etcd_file(name), text.encode(), mode=PRIVATE_FILE)
    _bound_log(paths)
    arguments = [str(paths.home), find_binary()]
    start_detached(
        paths, "insitu.cluster.failover.etcd_process", arguments, paths.etcd_file(LOG), _START_SECONDS
    )


def _bound_log(paths: Paths) -> None:
    """Put a long log aside. etcd itself logs warnings alone."""
    with contextlib.suppress(OSError):
        if paths.etcd_file(LOG).stat().st_size > MAX_LOG_BYTES:
            paths.etcd_file(LOG).rename(rotated_path(paths.etcd_file(LOG)))


def _wait_until_it_listens(paths: Paths, record: MemberRecord) -> None:
    deadline = time.monotonic() + _LISTEN_SECONDS
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(parse_address(record.client), 1.0).close()
            return
        if not is_locked(paths.etcd_file(LOCK)) or time.monotonic() > deadline:
            raise ClusterError(
                f"A member of etcd must serve at {record.client}. Received: it has ended, or doesn't. It "
                f"said: {_read_last_line(paths)[-300:]}",
                logs=str(paths.etcd_file(LOG)),
            )
        time.sleep(_LOOK_SECONDS)


def _read_last_line(paths: Paths) -> str:
    try:
        lines = paths.etcd_file(LOG).read_text(errors="replace").split("\n")
    except OSError:
        return "nothing"
    return next((line for line in reversed(lines) if line.strip()), "nothing")


class MemberKeeper:
    """The thread of an agent that starts the member of its home again."""

    def __init__(self, paths: Paths, token: str) -> None:
        self._paths, self._token = paths, token
        self._closing = threading.Event()
        #: Whether the cluster has used the member when it was looked at last.
        self._is_needed = False
        self._thread = threading.Thread(target=self._run, name="insitu-etcd", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, *, ends: bool, deletes: bool) -> None:
        """Have the thread end. `ends`: the member, too; `deletes`: and its data goes."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            if ends:
                stop_member(self._paths, delete=deletes)
        except (InsituError, OSError) as error:
            logger.warning("the member of etcd runs on: %s", error)

    def _run(self) -> None:
        pause, said = _KEEP_SECONDS[0], ""
        while not self._closing.is_set():
            try:
                is_started, said = self._keep(), ""
                pause = min(2 * pause, _KEEP_SECONDS[1]) if is_started else _KEEP_SECONDS[0]
            except (InsituError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("the member of etcd isn't started: %s", said)
                pause = min(2 * pause, _KEEP_SECONDS[1])
            self._closing.wait(pause)

    def _keep(self) -> bool:
        """Start the member unless it runs. Returns whether it was started."""
        record, settings = read_member(self._paths), read_settings(self._paths)
        is_needed = record is not None and settings is not None and settings.peers == record.peers
        was_needed, self._is_needed = self._is_needed, is_needed
        if was_needed and not is_needed:
            logger.warning("the cluster has its metadata elsewhere now, and the member of etcd ends")
            stop_member(self._paths, delete=False)
        if record is None or not is_needed:
            return False
        if is_locked(self._paths.etcd_file(LOCK)):
            return False
        logger.warning("the member of etcd at %s is started", record.client)
        _launch(self._paths, record, self._token, is_new=False)
        return True
