"""Jobs whose data moves while they run, nodes that are to leave, and nodes that don't come back."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agent_hosts import LoopbackHosts, insitu, is_running, wait_until
from host_jobs import HostJobs, make_images

from insitu.base.paths import Paths
from insitu.cluster.wire.records import read_head
from insitu.grid import Catalog

pytestmark = pytest.mark.hosts

GATED = """
import hashlib, sys, time
from pathlib import Path

import keras
import insitu

folder = Path(sys.argv[1])
me = insitu.context()
print("WHERE", me.task, me.node, me.paths.home, flush=True)


class Gates(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and self.epoch in (1, 2):
            (folder / f"{me.role}-{me.index}-{self.epoch}").touch()
            while not (folder / f"go-{self.epoch}").exists():
                time.sleep(0.02)


train = insitu.dataset().shuffle().batch(48).map(lambda x, y: (x.reshape(len(x), 12) / 9, y))
with insitu.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(train, epochs=4, verbose=0, callbacks=[Gates()])
print("RESULT", hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest(), flush=True)
"""
"""Waits in the middle of two epochs until the test lets it continue."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[LoopbackHosts]:
    with contextlib.closing(LoopbackHosts(tmp_path, ("a",))) as found:
        yield found


def add_host(hosts: LoopbackHosts, name: str, *options: str) -> None:
    hosts.homes[name] = hosts.head.parent / name
    with hosts.file.open("a") as file:
        file.write(f"127.0.0.1 name={name} home={hosts.homes[name]}\n")
    hosts.up(*options)


def count_copies(hosts: LoopbackHosts, cache: str) -> dict[str, int]:
    owners = [node for p in Catalog(Paths(hosts.head)).get(cache).partitions for node in p.owners]
    return {str(node): owners.count(node) for node in sorted(set(owners))}


def test_workers_follow_their_data_and_leave_a_node_that_is_drained_with_the_same_bits(
    hosts: LoopbackHosts, tmp_path: Path
) -> None:
    hosts.up()
    images = make_images(tmp_path / "images")
    insitu(hosts.head, "import", "images", str(images), "--label-from-filename", "--partitions", "4")
    jobs = HostJobs(hosts.head, tmp_path / "job")
    (jobs.code / "train.py").write_text(GATED)
    gates = [jobs.meeting / "go-1", jobs.meeting / "go-2"]
    for gate in gates:
        gate.touch()
    _, undisturbed = jobs.finish(jobs.start(workers=2, cache="images"))
    for path in jobs.meeting.iterdir():
        path.unlink()

    def wait_at_gate(number: int) -> None:
        there = f"worker-*-{number}"
        wait_until(lambda: len(list(jobs.meeting.glob(there))) == 2 or jobs.assert_running(job), there)

    def pass_gate(number: int, after: str) -> None:
        """Let the job continue once `after` has been said."""
        wait_until(lambda: after in jobs.output(job) or jobs.assert_running(job), after)
        gates[number - 1].touch()

    job = jobs.start(workers=2, cache="images")
    wait_at_gate(1)
    add_host(hosts, "b")
    insitu(hosts.head, "rebalance", "images")
    assert count_copies(hosts, "images") == {"a": 2, "b": 2}
    pass_gate(1, "moves from a to b: its data has moved")
    wait_at_gate(2)
    assert sorted(t["node"] for t in jobs.describe(job)["task_list"]) == ["a", "b"]
    insitu(hosts.head, "drain", "a", "--deadline", "5m")
    assert "one must stay" in insitu(hosts.head, "drain", "b", code=2).stderr
    pass_gate(2, "moves from a to b: a is to leave")
    found, weights = jobs.finish(job)
    assert weights == undisturbed and len(weights) == 1
    assert [t["node"] for t in found["task_list"]] == ["b", "b"] and found["attempt"] == 1
    assert [r["how"] for r in found["recoveries"]] == ["moved", "moved"]

    wait_until(lambda: hosts.states()["a"] == "drained", "a is drained")
    assert count_copies(hosts, "images") == {"b": 4}
    assert "verified: 4 files" in insitu(hosts.head, "describe", "images", "--verify").stdout
    np.save(tmp_path / "x.npy", np.arange(6_000))
    insitu(hosts.head, "import", "more", str(tmp_path / "x.npy"), "--partitions", "2")
    assert count_copies(hosts, "more") == {"b": 2}
    insitu(hosts.head, "drain", "a", "--cancel")
    assert hosts.states() == {"a": "alive", "b": "alive"}


def test_what_a_node_had_is_copied_again_when_it_is_lost_or_gets_sigterm(
    hosts: LoopbackHosts, tmp_path: Path
) -> None:
    hosts.up("--copy-lost-after", "off")
    for name in ("b", "c"):
        add_host(hosts, name)
    np.save(tmp_path / "x.npy", np.arange(60_000))
    insitu(hosts.head, "import", "x", str(tmp_path / "x.npy"), "--partitions", "6", "--backups", "1")
    assert count_copies(hosts, "x") == {"a": 4, "b": 4, "c": 4}

    os.kill(hosts.agent_pid("c"), signal.SIGKILL)
    wait_until(lambda: hosts.states()["c"] == "lost", "the loss")
    hosts.file.write_text("".join(f"127.0.0.1 name={n} home={hosts.homes[n]}\n" for n in "ab"))
    assert count_copies(hosts, "x") == {"a": 4, "b": 4, "c": 4}
    hosts.up("--copy-lost-after", "1s")
    wait_until(lambda: count_copies(hosts, "x") == {"a": 6, "b": 6}, "copies are made again")
    assert "verified: 12 files" in insitu(hosts.head, "describe", "x", "--verify").stdout

    # A machine that gets SIGTERM some time before it goes.
    hosts.homes["d"] = tmp_path / "d"
    record = read_head(Paths(hosts.head))
    assert record is not None
    token = (hosts.head / "token").read_text()
    options = ("--name", "d", "--head", record.address, "--drain-on-term", "90s")
    insitu(hosts.homes["d"], "agent", "--detach", "--token-stdin", *options, given=f"{token}\n")
    insitu(hosts.head, "rebalance", "x")
    assert count_copies(hosts, "x") == {"a": 4, "b": 4, "d": 4}
    insitu(hosts.head, "import", "alone", str(tmp_path / "x.npy"), "--partitions", "3")
    pid = hosts.agent_pid("d")
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_running(pid), "the agent has ended")
    assert count_copies(hosts, "x") == {"a": 6, "b": 6} and hosts.states()["d"] == "left"
    assert "verified: 12 files" in insitu(hosts.head, "describe", "x", "--verify").stdout
    # What only that node had was copied from itself.
    assert "verified: 3 files" in insitu(hosts.head, "describe", "alone", "--verify").stdout
    assert "copied again for c" in Paths(hosts.head).head_log.read_text()


def test_a_lost_node_that_will_not_come_back_is_given_up(hosts: LoopbackHosts, tmp_path: Path) -> None:
    hosts.up("--copy-lost-after", "off")
    for name in ("b", "c"):
        add_host(hosts, name)
    np.save(tmp_path / "x.npy", np.arange(60_000))
    insitu(hosts.head, "import", "x", str(tmp_path / "x.npy"), "--partitions", "6", "--backups", "1")
    insitu(hosts.head, "import", "alone", str(tmp_path / "x.npy"), "--partitions", "3")
    os.kill(hosts.agent_pid("c"), signal.SIGKILL)
    wait_until(lambda: hosts.states()["c"] == "lost", "the loss")

    assert "c is lost. It has left once" in insitu(hosts.head, "drain", "c").stderr
    wait_until(lambda: count_copies(hosts, "x") == {"a": 6, "b": 6}, "copies are made again")
    log = Paths(hosts.head).head_log
    wait_until(lambda: "left on nodes that leave: c: 1 copies" in log.read_text(), "a look")
    assert hosts.states()["c"] == "lost", "a partition is nowhere else"
    insitu(hosts.head, "delete", "alone", "--yes")
    wait_until(lambda: hosts.states()["c"] == "left", "nothing is there that others need")
    hosts.up()
    wait_until(lambda: hosts.states()["c"] in ("draining", "drained"), "it is back, and is still to leave")
    insitu(hosts.head, "drain", "c", "--cancel")
    wait_until(lambda: hosts.states()["c"] == "alive", "it stays")
