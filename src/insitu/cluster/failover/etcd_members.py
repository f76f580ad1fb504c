"""The part of `insitu up` for an etcd that insitu runs itself: it has hosts of the file start members."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from insitu.base.errors import ClusterError, InputError, StoreUnavailable
from insitu.base.paths import Paths
from insitu.cluster.failover.etcd_member import make_etcd_credentials
from insitu.cluster.wire import (
    HostLine,
    Outcome,
    change_head,
    choose_head_address,
    make_member_command,
    make_stop_command,
    make_token,
    read_head,
    resolve_interface,
    run_on_hosts,
)
from insitu.exchange import parse_address
from insitu.metadata import MetadataSettings, open_etcd, read_settings

OWN_ETCD = "etcd"
"""The value of `--metadata` for an etcd that insitu runs."""
MEMBERS = 3
"""With fewer hosts there is one member: of two none may be lost, either."""
_READY_SECONDS, _CONNECT_SECONDS = 60.0, 2.0

Report = Callable[[Outcome], None]


class HostCommands:
    """Runs a command for members on each host of a file."""

    def __init__(self, lines: Sequence[HostLine], launcher: str, insitu: str, interface: str) -> None:
        self.lines, self._launcher, self._insitu = lines, launcher, insitu
        #: The address on which the head of this machine listens; empty: one at which the hosts reach it.
        self._interface = interface

    def prepare(self, lines: Sequence[HostLine]) -> list[Outcome]:
        """Have hosts draw names and ports."""
        named = self._interface
        own = resolve_interface(named) if named else choose_head_address(line.address for line in self.lines)
        return self._run(lines, "prepare", own, "")

    def start(self, given: str) -> list[Outcome]:
        """Have all hosts start the members that they have."""
        return self._run(self.lines, "start", "", given)

    def stop(self) -> list[Outcome]:
        """Have all hosts end the members that they have."""
        return self._run(self.lines, "stop", "", "")

    def list_stops(self, lines: Sequence[HostLine]) -> dict[str, str]:
        """Return what ends agent and member of each line, by its name."""
        return {line.label: make_stop_command(line, self._insitu) for line in lines}

    def record_launcher(self, paths: Paths, lines: Sequence[HostLine]) -> None:
        """Have `insitu down` end members, before there are agents."""
        record = read_head(paths)
        hosts = {**((record and record.hosts) or {}), **self.list_stops(lines)}
        launchers = dict.fromkeys((line.label for line in lines), self._launcher)
        known = (record and record.launchers) or {}
        change_head(paths, launcher=self._launcher, hosts=hosts, launchers={**known, **launchers})

    def _run(self, lines: Sequence[HostLine], what: str, head: str, given: str) -> list[Outcome]:
        commands = [(line.host, make_member_command(line, self._insitu, what, head)) for line in lines]
        return run_on_hosts(self._launcher, commands, given, lambda outcome: None)


def check_members(paths: Paths) -> dict[str, str]:
    """Return the addresses of the members that insitu runs for the cluster of this home, each with why it
    takes no connection, or "". Raises InsituError."""
    settings, found = read_settings(paths), {}
    if settings is not None and settings.peers:
        for address in settings.url.removeprefix("etcd://").partition("?")[0].split(","):
            found[address] = ""
            try:
                socket.create_connection(parse_address(address), _CONNECT_SECONDS).close()
            except OSError as error:
                found[address] = str(error)
    return found


def make_members(paths: Paths, commands: HostCommands) -> MetadataSettings:
    """Choose the hosts of members, and have them draw names and ports. Nothing is started. Returns the
    settings, which this home doesn't keep yet. Raises ClusterError if a host has no etcd."""
    lines = commands.lines[:MEMBERS] if len(commands.lines) >= MEMBERS else commands.lines[:1]
    found = [_read_answer(outcome) for outcome in commands.prepare(lines)]
    if len({each["peer"] for each in found}) < len(found):
        raise InputError(
            f"Each member of etcd has a home of its own. Received: one home for "
            f"{', '.join(line.host for line in lines)}. Give each host its own by home=FOLDER"
        )
    record = read_head(paths)
    cluster = secrets.token_hex(16) if record is None else record.cluster
    others = {each["cluster"] for each in found} - {"", cluster}
    if others:
        raise InputError(
            f"A new cluster begins with new members of etcd. Received: hosts with one of cluster "
            f"{', '.join(sorted(each[:8] for each in others))}. Run `insitu up` in the home of that cluster, "
            f"or remove the folder `etcd` in INSITU_HOME there if it is given up"
        )
    made = make_etcd_credentials(cluster, make_token(paths))
    files = {"ca": made.authority, "certificate": made.own.pem, "key": made.own.key_pem}
    shown = "&".join(f"{name}=insitu" for name in files)
    peers = ",".join(f"{each['name']}=https://{each['peer']}" for each in found)
    url = f"etcd://{','.join(each['client'] for each in found)}?{shown}"
    change_head(paths, cluster=cluster)
    commands.record_launcher(paths, lines)
    return MetadataSettings(cluster, url, files, peers)


def _read_answer(outcome: Outcome) -> dict[str, str]:
    names = {"name", "client", "peer", "cluster"}
    answer = outcome.answer
    if answer is None or not all(isinstance(answer.get(name), str) for name in names):
        raise ClusterError(f"{outcome.host} must start a member of etcd. Received: {outcome.problem}")
    return {name: answer[name] for name in names}


def start_members(
    paths: Paths, settings: MetadataSettings, commands: HostCommands, report: Report, *, is_new: bool
) -> None:
    """Start the members that don't run, and wait until most answer. `is_new`: they may begin without data.
    Raises InputError, ClusterError, MetadataError."""
    order = {"cluster": settings.cluster, "peers": settings.peers, "new": is_new}
    outcomes = commands.start(f"{make_token(paths)}\n{json.dumps(order)}\n")
    for outcome in outcomes:
        if outcome.answer is None or outcome.answer.get("etcd"):
            report(outcome)
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            open_etcd(settings, create=is_new).close()
            return
        except StoreUnavailable as error:
            if time.monotonic() > deadline or all(outcome.answer is None for outcome in outcomes):
                raise ClusterError(
                    f"Most members of etcd must run. Received: {error}. The file etcd/log in INSITU_HOME of "
                    f"their hosts says why"
                ) from error
