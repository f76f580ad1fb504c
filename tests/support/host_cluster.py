"""A cluster on the hosts of hosts_lab.py, as somebody sees it who runs commands beside them and on them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from agent_hosts import INSITU, insitu
from etcd_servers import ETCD
from hosts_lab import Host, HostsLab

from insitu.base.paths import Paths

LOCALLY = f"--launcher 'env HOST={{host}} sh -c' --insitu '{INSITU}'"
"""Options of `insitu up` that start an agent on the machine of the head itself."""


class Cluster:
    """A head beside the hosts, and how it sees them."""

    def __init__(self, lab: HostsLab, head: Path) -> None:
        self.lab = lab
        self.head = head
        self.paths = Paths(head)
        self.file = head.with_name("hosts.txt")
        self.write_hosts(*(host.address for host in lab.hosts))

    def write_hosts(self, *lines: str) -> None:
        self.file.write_text("".join(f"{line}\n" for line in lines))

    def up(self, *options: str, code: int = 0) -> str:
        hosts = ("--hosts", str(self.file), "--launcher", self.lab.launcher, "--insitu", INSITU)
        return insitu(self.head, "up", *hosts, *options, code=code).stderr

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {each["node"]: each for each in json.loads(insitu(self.head, "nodes", "--json").stdout)}

    def states(self) -> tuple[str, ...]:
        """The states of host1, host2, ..."""
        found = self.nodes()
        return tuple(found[host.name]["state"] for host in self.lab.hosts if host.name in found)

    def on(self, host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run insitu on a host."""
        return self.run_on(host, f"{INSITU} {' '.join(arguments)}")

    def run_on(self, host: Host, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the shell on a host."""
        return subprocess.run(
            [*self.lab.launcher.replace("{host}", host.address).split(), command],
            capture_output=True,
            text=True,
            timeout=250,
        )


def count_tasks(host: Host) -> int:
    """How many processes run on a host beside its agent."""
    return sum("insitu.cluster.nodes.agent_process" not in line for line in host.processes().values())


def start_etcd(cluster: Cluster) -> str:
    """Start a member of an etcd on each host. Returns its URL."""
    hosts = cluster.lab.hosts
    members = ",".join(f"{host.name}=http://{host.address}:2380" for host in hosts)
    for host in hosts:
        client, peer = f"http://{host.address}:2379", f"http://{host.address}:2380"
        options = f"--name {host.name} --data-dir {host.disk / 'etcd'} --initial-cluster {members}"
        options += f" --listen-client-urls {client} --advertise-client-urls {client}"
        options += f" --listen-peer-urls {peer} --initial-advertise-peer-urls {peer}"
        started = cluster.run_on(
            host,
            f"rm -rf {host.disk / 'etcd'}; "
            f"setsid {ETCD} {options} > {host.disk / 'etcd.log'} 2>&1 < /dev/null &",
        )
        assert started.returncode == 0, started.stderr
    return f"etcd://{','.join(f'{host.address}:2379' for host in hosts)}"
