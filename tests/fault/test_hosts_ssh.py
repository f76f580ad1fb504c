"""Agents on hosts that a real ssh reaches, by the launcher that `insitu up` has without options.

Needs root, iproute2 and OpenSSH; nothing of this machine's own ssh is read or changed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_hosts import insitu
from host_jobs import HostJobs, make_images, run_undisturbed
from hosts_lab import Host, HostsLab, find_obstacle
from ssh_hosts import PASSWORD_PORT, SshHosts
from ssh_hosts import find_obstacle as find_ssh_obstacle

from insitu.base.paths import Paths

pytestmark = [pytest.mark.hosts, pytest.mark.slow]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsLab]:
    if obstacle := find_obstacle() or find_ssh_obstacle():
        pytest.skip(obstacle)
    with HostsLab(tmp_path_factory.mktemp("lab"), 3) as lab:
        yield lab


class SshCluster:
    """A head beside hosts that are reached by ssh."""

    def __init__(self, lab: HostsLab, folder: Path) -> None:
        self.hosts, self.head = lab.hosts, folder / "head"
        self.ssh = SshHosts(lab, folder / "ssh")
        self.file = folder / "hosts.txt"

    def up(self, *lines: str, code: int = 0, options: tuple[str, ...] = ()) -> str:
        self.file.write_text("".join(f"{line}\n" for line in lines))
        return self.ssh.insitu(self.head, "up", "--hosts", str(self.file), *options, code=code).stderr

    def down(self, *options: str) -> None:
        self.ssh.insitu(self.head, "down", *options)

    def leftovers(self, host: Host) -> list[str]:
        """What runs on a host beside the servers of ssh that listen."""
        return [command for command in host.processes().values() if "[listener]" not in command]


@pytest.fixture
def cluster(lab: HostsLab, tmp_path: Path) -> Iterator[SshCluster]:
    found = SshCluster(lab, tmp_path)
    yield found
    for host in lab.hosts:
        host.heal()
    found.ssh.insitu(found.head, "down")
    lab.clear()


def test_hosts_come_up_import_train_and_go_down_over_ssh(cluster: SshCluster, tmp_path: Path) -> None:
    names = [host.name for host in cluster.hosts]
    first, *others = cluster.hosts
    said = cluster.up(first.name, f"root@{others[0].address}", f"{others[1].address} interface=eth0")
    assert "3 of 3 hosts up" in said and f"host1: host1 serves at {first.address}:" in said
    assert "runs already" in cluster.up(first.name)

    insitu(cluster.head, "import", "images", str(make_images(tmp_path / "images")), "--backups", "1")
    partitions = {
        host.name: len(list(Paths(host.home).node(host.name).rglob("part-*.arrow"))) for host in cluster.hosts
    }
    assert all(partitions.values()), partitions

    jobs = HostJobs(cluster.head, tmp_path / "job")
    jobs.let_go()
    job = jobs.start(workers=3)
    described, weights = jobs.finish(job)
    assert described["state"] == "finished" and weights == run_undisturbed(tmp_path / "alone", 3)
    assert sorted(host for _, host, _ in jobs.where(job).values()) == names

    cluster.down()
    for host in cluster.hosts:
        assert cluster.leftovers(host) == [] and host.shared_memory() == [], host.name
        assert Paths(host.home).node(host.name).exists()
    cluster.up(f"[{first.address6}]", *(f"root@[{host.address6}]" for host in others))
    cluster.down("--force")
    for host in cluster.hosts:
        assert cluster.leftovers(host) == [] and not any(Paths(host.home).nodes.iterdir())


def test_hosts_that_ssh_cannot_use_are_named_with_a_remedy_and_others_stay_up(cluster: SshCluster) -> None:
    first, second, third = cluster.hosts
    alias = "Host {}\n  HostName {}\n  HostKeyAlias {}\n  Port {}\n"
    cluster.ssh.configure(
        alias.format("stranger", second.address, "stranger", 22)
        + alias.format("passwords", second.address, second.name, PASSWORD_PORT)
        + alias.format("deaf", second.address, second.name, 1)
    )
    third.cut()
    bad = {
        "stranger": ("Host key verification failed", "accept it once by `ssh stranger`"),
        "nobody@host2": ("nobody@host2: Permission denied", "`ssh-copy-id nobody@host2`"),
        "passwords": ("Permission denied (password", "`ssh passwords true` must work without a question"),
        "nowhere.invalid": ("Could not resolve hostname nowhere.invalid", "Correct its name in the file"),
        "bare@host2": ("insitu: command not found", "--insitu /opt/venv/bin/insitu"),
        "leaving@host2": ("This machine is closed today", "~/.bashrc"),
        "closed@host2": ("This account is currently not available", "ended with code 1"),
        "deaf": ("Connection refused", "Another port goes into ~/.ssh/config"),
        "host3": ("connect to host host3", "Check that it is on"),
    }
    # One whose shell greets in JSON comes up like any other.
    said = cluster.up("host1", *bad, "chatty@host2", code=1)
    lines = {line.partition(": ")[0]: line for line in said.splitlines()}
    for host, parts in bad.items():
        assert all(part in lines[host] for part in parts), (host, parts, lines[host])
    assert f"host1: host1 serves at {first.address}:" in said
    assert f"chatty@host2: host2 serves at {second.address}:" in said
    assert "2 of 11 hosts up" in said and f"Received: {', '.join(bad)} didn't" in said

    # What didn't come up isn't waited for by `down`, and nothing of ssh is left.
    third.heal()
    cluster.down()
    assert [cluster.leftovers(host) for host in cluster.hosts] == [[], [], []]


def test_a_connection_that_ssh_keeps_for_later_holds_up_nothing(cluster: SshCluster) -> None:
    with tempfile.TemporaryDirectory(prefix="ssh") as folder:  # the path of a socket is short
        cluster.ssh.configure(f"ControlMaster auto\nControlPath {folder}/%C\nControlPersist 5m\n")
        assert "2 of 2 hosts up" in cluster.up("host1", "host2")
        cluster.down()
        for name in ("host1", "host2"):
            cluster.ssh.run(cluster.head, "ssh", "-O", "exit", name)
    assert [cluster.leftovers(host) for host in cluster.hosts] == [[], [], []]
