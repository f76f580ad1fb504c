"""Makes parts of a cluster on hosts silent, and finds its head."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from agent_hosts import INSITU, wait_until
from host_cluster import LOCALLY, Cluster
from hosts_lab import Host

from insitu.base.paths import Paths
from insitu.cluster.job_files import is_locked
from insitu.cluster.wire.records import read_head


def find_processes(host: Host, word: str) -> list[int]:
    found = [pid for pid, line in host.processes().items() if word in line]
    assert found, (word, host.processes())
    return found


@contextmanager
def suspended(processes: Sequence[int]) -> Iterator[None]:
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def cut(host: Host) -> Iterator[None]:
    host.cut()
    try:
        yield
    finally:
        host.heal()
        host.wait_for_link()


@contextmanager
def cut_between(one: Host, other: Host) -> Iterator[None]:
    """Have packets between two hosts go nowhere, which no one says."""
    nowhere = "02:00:00:00:00:01"
    pairs = ((one, other), (other, one))
    for host, peer in pairs:
        ip = ("ip", "-n", host.namespace, "neigh", "replace", peer.address)
        subprocess.run([*ip, "lladdr", nowhere, "dev", "eth0", "nud", "permanent"], check=True)
    try:
        yield
    finally:
        for host, peer in pairs:
            subprocess.run(
                ["ip", "-n", host.namespace, "neigh", "del", peer.address, "dev", "eth0"], check=True
            )


#: Makes something silent, by its name. The head and an agent are on the first host, agents on all.
FAULTS: dict[str, Callable[[Sequence[Host]], Any]] = {
    "an agent": lambda hosts: suspended(find_processes(hosts[2], "agent_process")),
    "the head": lambda hosts: suspended(find_processes(hosts[0], "head_process")),
    "the head's host": lambda hosts: cut(hosts[0]),
    "one etcd": lambda hosts: suspended(find_processes(hosts[1], "--initial-cluster")),
    "two etcds": lambda hosts: suspended(
        [pid for host in hosts[1:] for pid in find_processes(host, "--initial-cluster")]
    ),
    "a link": lambda hosts: cut_between(hosts[1], hosts[2]),
}
MOVES = ("the head", "the head's host")


def begin(cluster: Cluster, *options: str) -> None:
    """Bring up a head on the first host, with agents on all."""
    first, *others = cluster.lab.hosts
    cluster.write_hosts(f"{first.address} name=host1 home={first.disk / 'agent'}")
    brought = cluster.on(first, f"up --hosts {cluster.file} {LOCALLY} {' '.join(options)}")
    assert brought.returncode == 0, brought.stderr
    head = read_head(Paths(first.home))
    assert head is not None
    for host in others:
        joined = cluster.run_on(
            host,
            f"{INSITU} agent --detach --token-stdin --head {head.address} < {Paths(first.home).token}",
        )
        assert joined.returncode == 0, joined.stderr
    cluster.head = first.home


class Head(NamedTuple):
    """A host with a head, and the head's home there."""

    host: Host
    home: Path

    def run(self, cluster: Cluster, arguments: str) -> subprocess.CompletedProcess[str]:
        """Run insitu in the home of the head."""
        return cluster.run_on(self.host, f"INSITU_HOME={self.home} {INSITU} {arguments}")


def list_homes(cluster: Cluster) -> list[Head]:
    """Return all places of a head. The first host has the home of the first head, and its agent's."""
    hosts = cluster.lab.hosts
    return [Head(host, host.home) for host in hosts] + [Head(hosts[0], hosts[0].disk / "agent")]


def find_head(cluster: Cluster, above: int = 0) -> Head | None:
    """Return the head with the highest epoch, if that is above `above` and it runs."""
    found = [(record.epoch, at) for at in list_homes(cluster) if (record := read_head(Paths(at.home)))]
    epoch, head = max(found, key=lambda each: each[0])
    return head if epoch > above and is_locked(Paths(head.home).head_lock) else None


def count_heads(cluster: Cluster) -> int:
    """Return how many heads run."""
    return sum(is_locked(Paths(at.home).head_lock) for at in list_homes(cluster))


def wait_for_agents(cluster: Cluster, count: int, *, above: int = 0, alone: bool = True) -> Head:
    """Wait until a head above an epoch has so many agents, `alone` if no other one may run. Return it."""

    def find() -> Head | None:
        head = find_head(cluster, above)
        listed = head and head.run(cluster, "nodes --json")
        if not head or not listed or listed.returncode or (alone and count_heads(cluster) > 1):
            return None
        alive = sum(each["state"] == "alive" for each in json.loads(listed.stdout))
        return head if alive >= count else None

    found: Head = wait_until(find, f"a head with {count} agents", 120.0)
    return found
