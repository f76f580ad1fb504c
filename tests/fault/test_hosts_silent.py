"""Something falls silent: each operation ends, and nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from agent_hosts import INSITU
from etcd_servers import needs_etcd
from host_cluster import Cluster, start_etcd
from hosts_lab import Host
from silent_hosts import FAULTS, MOVES, Head, begin, wait_for_agents

from insitu.base.paths import Paths
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

    def run(self, operation: str, head: Head, arguments: str) -> bool:
        began = os.times().elapsed
        done = head.run(self.cluster, arguments)
        said = "" if done.returncode == 0 else done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        self.seen.append((operation, said, os.times().elapsed - began))
        return done.returncode == 0

    def import_rows(self, head: Head, name: str) -> None:
        rows = self.folder / f"{name}.npz"
        np.savez(rows, x=np.arange(480, dtype="float32").reshape(120, 4), y=np.ones((120, 1), "float32"))
        if self.run("import", head, f"import {name} {rows} --partitions 6 --backups 1"):
            self.caches.append(name)

    def train(self, head: Head, name: str, cache: str) -> bool:
        code = self.folder / name
        code.mkdir()
        (code / "train.py").write_text(TRAINING.replace("NAME", name))
        options = f"--workers 2 --threads 1 --standby 0 {cache} {code} train.py"
        return self.run("start", head, f"start {options}")

    def check(self, head: Head) -> None:
        """Assert that all is there that was acknowledged."""
        self.read()
        log = self.cluster.on(self.clients[0], "fs cat insitu://v/log").stdout.split()
        assert len(set(log)) == len(log), "nothing was appended twice"
        assert set(self.appended) <= set(log) <= {*self.appended, *self.unknown}
        listed = json.loads(head.run(self.cluster, "caches --json").stdout)
        assert set(self.caches) <= {each["name"] for each in listed}, listed
        for cache in self.caches:
            verified = head.run(self.cluster, f"describe {cache} --verify")
            assert verified.returncode == 0 and "damaged" not in verified.stdout, verified.stdout


@pytest.mark.parametrize("metadata", ["embedded", pytest.param("etcd", marks=needs_etcd)])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_nothing_acknowledged_is_lost_while_something_is_silent(
    cluster: Cluster, tmp_path: Path, fault: str, metadata: str, request: pytest.FixtureRequest
) -> None:
    if "etcd" in fault and metadata == "embedded":
        pytest.skip("has no etcd")
    hosts = cluster.lab.hosts
    begin(cluster, *(("--metadata", start_etcd(cluster)) if metadata == "etcd" else ()))
    first = wait_for_agents(cluster, 3)
    record = read_head(Paths(first.home))
    assert first.host is hosts[0] and record is not None
    clients = {"an agent": hosts[:2], "the head's host": hosts[1:]}.get(fault, hosts[1:])
    trial = Trial(cluster, tmp_path, clients)
    request.addfinalizer(lambda: show(trial, f"{metadata}, {fault}"))
    trial.import_rows(first, "before")
    trial.write("before")
    trial.append("before")
    assert len(trial.written) == 6 and len(trial.appended) == 8 and trial.caches == ["before"]
    with FAULTS[fault](hosts):
        head = first
        if metadata == "etcd" and fault in MOVES:
            head = wait_for_agents(cluster, 2, above=record.epoch, alone=False)
        trial.write("silent")
        trial.append("silent")
        if head is not first or fault not in MOVES:
            trial.import_rows(head, "silent")
            trial.run("rebalance", head, "rebalance before")
            trial.train(head, "silent", "before")
            if fault != "two etcds":  # nobody may say what a name stands for without most of them
                trial.read()
    head = wait_for_agents(cluster, 3)
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
