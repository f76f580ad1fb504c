"""Something falls silent: each operation ends, and nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_hosts import INSITU, wait_until
from etcd_servers import needs_etcd
from host_cluster import LOCALLY, Cluster, start_etcd
from hosts_lab import Host

from insitu.base.paths import Paths
from insitu.cluster.job_files import is_locked
from insitu.cluster.wire.records import read_head

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(900)]

CLIENT = """
import json, sys, time
from insitu.cluster import InsituFileSystem
from insitu.errors import InsituError

kind, path, *lines = sys.argv[1:]
system = InsituFileSystem()
for line in lines:
    began = time.monotonic()
    try:
        if kind == "write":
            system.pipe(f"{path}/{line}", line.encode())
        elif kind == "append":
            with system.open(path, "ab") as file:
                file.write(f"{line} ".encode())
        else:
            assert system.cat(f"{path}/{line}").decode() == line
        said = ""
    except InsituError as error:
        said = str(error)
    print(json.dumps([line, said, time.monotonic() - began]), flush=True)
"""
TRAINING = """
import keras, numpy as np
import insitu

with insitu.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
rows = insitu.dataset(features="x", label="y").shuffle().batch(8)
model.fit(rows, epochs=2, verbose=0, callbacks=[insitu.BackupAndRestore("insitu://ckpt/NAME", save_freq=2)])
print("TRAINED", flush=True)
"""


@dataclass
class Trial:
    """What clients were told, under one fault."""

    cluster: Cluster
    folder: Path
    #: The hosts on which clients run.
    clients: Sequence[Host]
    #: What was acknowledged: files, lines of the log, caches.
    written: list[str] = field(default_factory=list)
    appended: list[str] = field(default_factory=list)
    #: Lines of the log of which the writer doesn't know.
    unknown: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)
    #: (operation, what it said if it failed, seconds).
    seen: list[tuple[str, str, float]] = field(default_factory=list)

    def client(self, host: Host, *arguments: str) -> subprocess.Popen[str]:
        script = self.folder / "client.py"
        script.write_text(CLIENT)
        python = INSITU.split()[0]
        command = f"{python} {script} {' '.join(arguments)}"
        return subprocess.Popen(
            [*self.cluster.lab.launcher.replace("{host}", host.address).split(), command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def collect(self, operation: str, process: subprocess.Popen[str]) -> list[tuple[str, str]]:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, (operation, out, err)
        answers = [json.loads(line) for line in out.splitlines()]
        self.seen += [(operation, said, seconds) for _, said, seconds in answers]
        return [(line, said) for line, said, _ in answers]

    def write(self, name: str) -> None:
        for number, host in enumerate(self.clients):
            lines = [f"{name}-{number}-{index}" for index in range(3)]
            answers = self.collect("write", self.client(host, "write", "v", *lines))
            self.written += [line for line, said in answers if not said]

    def append(self, name: str) -> None:
        """Two writers append to one file."""
        lines = [[f"{name}-{number}-{index}" for index in range(4)] for number in range(2)]
        running = [
            self.client(host, "append", "v/log", *each)
            for host, each in zip(self.clients, lines, strict=False)
        ]
        for process in running:
            for line, said in self.collect("append", process):
                (self.unknown if said else self.appended).append(line)

    def read(self) -> None:
        for host in self.clients:
            answers = self.collect("read", self.client(host, "read", "v", *self.written))
            assert not [said for _, said in answers if said], answers

    def run(self, operation: str, host: Host, *arguments: str) -> bool:
        began = os.times().elapsed
        done = self.cluster.on(host, *arguments)
        said = "" if done.returncode == 0 else done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        self.seen.append((operation, said, os.times().elapsed - began))
        return done.returncode == 0

    def import_rows(self, head: Host, name: str) -> None:
        rows = self.folder / f"{name}.npz"
        np.savez(rows, x=np.arange(480, dtype="float32").reshape(120, 4), y=np.ones((120, 1), "float32"))
        if self.run("import", head, "import", name, str(rows), "--partitions", "6", "--backups", "1"):
            self.caches.append(name)

    def train(self, head: Host, name: str, cache: str) -> bool:
        code = self.folder / name
        code.mkdir()
        (code / "train.py").write_text(TRAINING.replace("NAME", name))
        options = f"--workers 2 --threads 1 --standby 0 {cache} {code} train.py"
        return self.run("start", head, f"start {options}")

    def check(self, head: Host) -> None:
        """Assert that all is there that was acknowledged."""
        self.read()
        log = self.cluster.on(self.clients[0], "fs cat insitu://v/log").stdout.split()
        assert len(set(log)) == len(log), "nothing was appended twice"
        assert set(self.appended) <= set(log) <= {*self.appended, *self.unknown}
        listed = json.loads(self.cluster.on(head, "caches --json").stdout)
        assert set(self.caches) <= {each["name"] for each in listed}, listed
        for cache in self.caches:
            verified = self.cluster.on(head, f"describe {cache} --verify")
            assert verified.returncode == 0 and "damaged" not in verified.stdout, verified.stdout


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


def find_head(cluster: Cluster, above: int = 0) -> Host | None:
    """Return the host of the head with the highest epoch, if that is above `above` and runs."""
    found = [(record.epoch, host) for host in cluster.lab.hosts if (record := read_head(Paths(host.home)))]
    epoch, host = max(found, key=lambda each: each[0])
    return host if epoch > above and is_locked(Paths(host.home).head_lock) else None


def wait_for_agents(cluster: Cluster, head: Host, count: int) -> None:
    def are_alive() -> bool:
        listed = cluster.on(head, "nodes --json")
        if listed.returncode:
            return False
        return sum(each["state"] == "alive" for each in json.loads(listed.stdout)) >= count

    wait_until(are_alive, f"{count} agents", 120.0)


@pytest.mark.parametrize("metadata", ["embedded", pytest.param("etcd", marks=needs_etcd)])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_nothing_acknowledged_is_lost_while_something_is_silent(
    cluster: Cluster, tmp_path: Path, fault: str, metadata: str, request: pytest.FixtureRequest
) -> None:
    if "etcd" in fault and metadata == "embedded":
        pytest.skip("has no etcd")
    hosts = cluster.lab.hosts
    begin(cluster, *(("--metadata", start_etcd(cluster)) if metadata == "etcd" else ()))
    first = find_head(cluster)
    record = read_head(Paths(hosts[0].home))
    assert first is hosts[0] and record is not None
    clients = {"an agent": hosts[:2], "the head's host": hosts[1:]}.get(fault, hosts[1:])
    trial = Trial(cluster, tmp_path, clients)
    request.addfinalizer(lambda: show(trial, f"{metadata}, {fault}"))
    trial.import_rows(first, "before")
    trial.write("before")
    trial.append("before")
    assert len(trial.written) == 6 and len(trial.appended) == 8 and trial.caches == ["before"]
    with FAULTS[fault](hosts):
        head: Host = first
        if metadata == "etcd" and fault in MOVES:
            head = wait_until(lambda: find_head(cluster, record.epoch), "another head")
            wait_for_agents(cluster, head, 2)
        trial.write("silent")
        trial.append("silent")
        if head is not hosts[0] or fault not in MOVES:
            trial.import_rows(head, "silent")
            trial.run("rebalance", head, "rebalance before")
            trial.train(head, "silent", "before")
            if fault != "two etcds":  # nobody may say what a name stands for without most of them
                trial.read()
    head = wait_until(lambda: find_head(cluster), "a head")
    wait_for_agents(cluster, head, 3)
    wait_until(
        lambda: sum(is_locked(Paths(host.home).head_lock) for host in hosts) == 1, "one head alone", 120.0
    )
    trial.check(head)
    assert trial.train(head, "after", "before"), trial.seen[-1]
    trial.import_rows(head, "after")
    trial.write("after")
    trial.append("after")
    trial.check(head)
    assert len(trial.caches) >= 2 and len(trial.written) >= 12


def show(trial: Trial, title: str) -> None:
    table = [
        f"{operation:10} {seconds:6.1f} s  {said[:300]}"
        for operation, said, seconds in trial.seen
        if said or operation != "read"
    ]
    print(f"\n{title}:", *table, sep="\n")
