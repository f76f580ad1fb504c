"""Servers and workers are killed: each acknowledged update is there, once, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_ranks import SECRET, Rank, without_main
from parameter_servers import DEADLINE, Servers, clients

from insitu.base.errors import ServerLost, ServerMoved, StorageFull
from insitu.parameters import Client, Table, connect
from insitu.parameters.server_connection import ServerConnection

UPDATER = {"name": "sgd", "learning_rate": 1.0}
"""With gradients of -1, each value is the number of pushes that it has seen."""
SHAPE = (300, 11)
KEYS = np.arange(-20, 20) * 7


def define(client: Client) -> None:
    client.define(
        {"counted": (SHAPE, "float32"), "b": ((5,), "float32")}, updater=UPDATER, min_piece_bytes=2000
    )
    client.define_tables([Table("rows", 3, initializer="constant", updater=UPDATER)])


def push_one(client: Client, shard: int, sequence: int, table: bool = True) -> None:
    for gradient in client.gradients(shard).values():
        gradient[...] = -1
    pending = [client.push(sequence, 2, shard=shard)]
    if table:
        pending.append(
            client.push_rows("rows", KEYS, np.full((len(KEYS), 3), -1, "f4"), sequence, shard=shard)
        )
    for future in pending:
        future.result(DEADLINE)


def check(client: Client, pushes: float, dense: float | None = None) -> None:
    """All rows have seen `pushes` pushes, all variables as many or `dense`."""
    client.pull().result()
    for name, values in client.values.items():
        np.testing.assert_array_equal(
            values, np.full(values.shape, pushes if dense is None else dense, "f4"), err_msg=name
        )
    rows = client.pull_rows("rows", KEYS).result()
    np.testing.assert_array_equal(rows, np.full(rows.shape, pushes, "f4"))


def work(pipe: Any, addresses: list[str], shard: int, pushes: int, options: dict[str, Any]) -> int:
    """A worker that continues where its shard was left, as one that was started anew does."""
    with connect(addresses, shard, secret=SECRET, timeout=30, stall_timeout=DEADLINE, **options) as client:
        define(client)
        client.pull(shard).result()
        dense, table = client.last_applied(shard) + 1, client.last_applied(shard, table="rows") + 1
        pipe.send(("from", min(dense, table)))
        for sequence in range(min(dense, table), pushes):
            if sequence >= dense:
                push_one(client, shard, sequence, table=sequence >= table)
            else:
                rows = np.full((len(KEYS), 3), -1, "f4")
                client.push_rows("rows", KEYS, rows, sequence, shard=shard).result()
            client.pull(shard).result()
        client.finish(shard).result()
    return pushes


def test_a_mirror_takes_over_all_acknowledged_updates():
    with Servers(2, mode="sync", backups=1) as servers, clients(servers.addresses, backups=1) as (client,):
        define(client)
        client.pull().result()
        for sequence in range(5):
            push_one(client, 0, sequence)
            client.pull().result()
        for lost in (1, 0):
            _wait_for_mirrors(client)
            servers.kill(lost)
            push_one(client, 0, sequence := sequence + 1)
            client.pull().result(DEADLINE)
            check(client, sequence + 1)
            servers.start(lost)
            # It holds everything again once it answers, and is mirrored before it acknowledges.
            push_one(client, 0, sequence := sequence + 1)
            client.pull().result()
        check(client, sequence + 1)
        assert client.last_applied() == sequence
        assert all(server["lost"] == 0 for server in client.stats())


def test_a_mirror_does_not_take_over_from_a_running_server():
    """A worker that is late asks the mirror when the server is back already."""
    with Servers(2, backups=1) as servers, clients(servers.addresses, backups=1) as (client,):
        define(client)
        _wait_for_mirrors(client)
        late = ServerConnection(0, servers.addresses, 5, SECRET, "auto")
        late.use_next_address()
        with pytest.raises(ServerMoved, match="it is up"):
            late.connect_once(time.monotonic() + DEADLINE)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_killing_at_random_times_loses_and_repeats_nothing(mode: str):
    _kill_at_random(mode, 3, pushes=90, seed=7)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["async", "bounded", "sync"])
def test_killing_fifty_times_loses_and_repeats_nothing(mode: str):
    _kill_at_random(mode, 50, pushes=3000, seed=11)


def _kill_at_random(mode: str, kills: int, pushes: int, seed: int) -> None:
    """Kills a server or a worker, starts it again, and so on; one thing at a time, as mirrors promise."""
    chance, killed = random.Random(seed), []
    with Servers(2, mode=mode, total_replicas=2, backups=1) as servers, contextlib.ExitStack() as stack:
        running: dict[int, Rank] = {}

        def start_worker(shard: int) -> None:
            with without_main():
                arguments = (servers.addresses, shard, pushes, {"backups": 1})
                running[shard] = Rank(work, arguments)

        def end_workers() -> None:
            for rank in running.values():
                rank.end()

        stack.callback(end_workers)
        for shard in (0, 1):
            start_worker(shard)
        first = {shard: running[shard].receive() for shard in (0, 1)}
        assert first == {0: 0, 1: 0}
        observer = stack.enter_context(_observer(servers.addresses))
        for turn in range(kills):
            _wait_until(observer, (turn + chance.random()) * pushes / (kills + 1))
            if chance.random() < 0.5:
                victim = chance.randrange(2)
                servers.kill(victim)
                killed.append(f"ps:{victim}")
                servers.start(victim)
            else:
                shard = chance.randrange(2)
                running.pop(shard).end()
                killed.append(f"worker:{shard}")
                start_worker(shard)
                running[shard].receive()
            _wait_for_mirrors(observer)
        assert len(killed) == kills
        assert {name.split(":")[0] for name in killed} == {"ps", "worker"}
        assert [rank.result() for rank in running.values()] == [pushes, pushes]
        # In mode sync a step is the mean of both workers' pushes.
        check(observer, 2 * pushes, pushes if mode == "sync" else 2 * pushes)
        stats = observer.stats()
        # Each server has counted each push of each shard once.
        assert [t["applied"] for t in stats] == [2 * pushes] * 2
        assert [t["lost"] for t in stats] == [0, 0]


@contextlib.contextmanager
def _observer(addresses: list[str]) -> Any:
    with connect(addresses, 9, shards=(), chief=False, secret=SECRET, backups=1, timeout=30) as client:
        define(client)
        yield client


def _wait_until(observer: Client, pushes: float) -> None:
    """Until the slower shard has come so far."""
    deadline = time.monotonic() + DEADLINE
    while min(observer.progress().get(shard, -1) for shard in (0, 1)) < pushes:
        assert time.monotonic() < deadline, "the workers stand still"
        time.sleep(0.005)


def _wait_for_mirrors(observer: Client) -> None:
    """Two deaths at a time aren't survived, and aren't promised to be."""
    deadline = time.monotonic() + DEADLINE
    while not all(server["mirrored"] for server in observer.stats()):
        assert time.monotonic() < deadline, "a mirror doesn't come back"
        time.sleep(0.01)


def test_without_a_mirror_the_checkpoint_is_restored_and_lost_updates_are_counted(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    with Servers(2) as servers, clients(servers.addresses) as (client,):
        define(client)
        client.pull().result()
        for sequence in range(6):
            push_one(client, 0, sequence)
        assert client.checkpoint(folder).result(DEADLINE) == 1
        for sequence in range(6, 10):
            push_one(client, 0, sequence)
        servers.kill(1)
        servers.start(1, checkpoint=folder)
        push_one(client, 0, 10)
        client.pull().result()
        stats = client.stats()
        assert [t["lost"] for t in stats] == [0, 8]  # four pushes, each of variables and of the table
        counted = {float(value) for value in client.values["counted"].reshape(-1)}
        assert counted == {11.0, 7.0}


def test_a_server_that_comes_back_empty_is_named():
    with Servers(1) as servers, clients(servers.addresses) as (client,):
        define(client)
        client.pull().result()
        servers.kill(0)
        servers.start(0)
        with pytest.raises(ServerLost, match="without what it held"):
            client.pull().result()


def test_checkpoints_are_consistent_over_all_servers(tmp_path: Path):
    """Two workers push all the time; in what is restored, all pieces have seen the same pushes."""
    folder, stop = tmp_path / "checkpoints", threading.Event()
    with Servers(3, total_replicas=2) as servers:
        with clients(servers.addresses, 2) as workers:
            for client in workers:
                define(client)

            def train(client: Client, shard: int) -> None:
                sequence = 0
                while not stop.is_set():
                    push_one(client, shard, sequence, table=False)
                    client.pull(shard).result()
                    sequence += 1

            threads = [threading.Thread(target=train, args=(c, s)) for s, c in enumerate(workers)]
            for thread in threads:
                thread.start()
            with _plain_observer(servers.addresses) as observer:
                made = [observer.checkpoint(folder).result(DEADLINE) for _ in range(3)]
            stop.set()
            for thread in threads:
                thread.join(DEADLINE)
            assert made == [1, 2, 3]
        for index in range(3):
            servers.kill(index)
            servers.start(index, checkpoint=folder)
        assert sorted(path.name for path in (folder / "server-0").iterdir()) == [
            "checkpoint-00000002",
            "checkpoint-00000003",
        ]
        with clients(servers.addresses, 2) as workers:
            define(workers[0])
            pushes = sum(workers[s].last_applied(s) + 1 for s in (0, 1))
            assert pushes > 0
            workers[0].pull(0).result()
            for values in workers[0].values.values():
                np.testing.assert_array_equal(values, np.full(values.shape, pushes, "f4"))


@contextlib.contextmanager
def _plain_observer(addresses: list[str]) -> Any:
    with connect(addresses, 9, shards=(), chief=False, secret=SECRET, timeout=30) as client:
        define(client)
        yield client


def _serve_on_a_small_disk(pipe: Any, addresses: list[str]) -> None:
    from insitu.parameters import ParameterServer

    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    server = ParameterServer(addresses[0], secret=SECRET)
    pipe.send(("ready", None))
    server.serve()


def test_a_full_disk_fails_the_checkpoint_and_training_goes_on(tmp_path: Path):
    from free_ports import free_addresses

    addresses = free_addresses(1)
    with without_main():
        rank = Rank(_serve_on_a_small_disk, (addresses,))
    try:
        rank.receive()
        with clients(addresses) as (client,):
            define(client)
            push_one(client, 0, 0)
            with pytest.raises(StorageFull, match="The last published one stays"):
                client.checkpoint(tmp_path).result(DEADLINE)
            push_one(client, 0, 1)
            check(client, 2)
            assert os.listdir(tmp_path / "server-0") == []
    finally:
        rank.end()


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path):
    with Servers(1) as servers, clients(servers.addresses) as (client,):
        define(client)
        for sequence in range(2):
            push_one(client, 0, sequence)
            client.checkpoint(tmp_path).result(DEADLINE)
        newest = tmp_path / "server-0" / "checkpoint-00000002" / "arrays.bin"
        data = bytearray(newest.read_bytes())
        data[100] ^= 1
        newest.write_bytes(data)
        servers.kill(0)
        servers.start(0, checkpoint=tmp_path)
        client.pull().result()
        check(client, 1)
