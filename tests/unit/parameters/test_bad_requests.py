"""What users and strangers get wrong: told early, and without harm to the servers or to what they hold."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_ranks import SECRET
from parameter_servers import DEADLINE, clients, servers

from insitu.errors import InputError, NotFinite, ParameterError, SequenceError, ServerLost
from insitu.parameters import ParameterServer, Table, checkpoints, connect, event_loop, server_state

ONES = np.ones(4, np.float32)
MODEL = {name: ((4,), "float32", np.zeros(4, np.float32)) for name in ("a", "b")}
PLAIN = {"name": "sgd", "learning_rate": 1.0}


def test_numpys_numbers_count_as_well_as_pythons():
    with servers(2) as addresses, clients(addresses) as (client,):
        client.define(MODEL, updater=PLAIN)
        client.define_tables([Table("words", np.int64(2), seed=np.int64(5))])  # type: ignore[arg-type]
        gradients = {"a": ONES, "b": ONES}
        assert client.push(np.int64(0), np.int32(3), gradients=gradients).result() == "applied"
        rows = np.ones((1, 2), np.float32)
        assert client.push_rows("words", [7], rows, np.int64(0)).result() == "applied"  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0.5, float("inf"), "0", None])
def test_counts_are_whole_numbers(wrong: Any):
    with servers(2) as addresses, clients(addresses) as (client,):
        client.define(MODEL)
        for counts in ({"sequence": wrong, "rows": 1}, {"sequence": 0, "rows": wrong}):
            with pytest.raises(InputError, match=f"whole numbers.*{wrong!r}"):
                client.push(**counts, gradients={"a": ONES, "b": ONES})
        assert client.last_applied() == -1


def test_a_server_outlives_numbers_that_are_none():
    with servers(mode="sync") as addresses, clients(addresses) as (client,):
        client.define(MODEL)
        endless = {"shard": 0, "sequence": float("inf"), "step": 0, "rows": 1}
        with pytest.raises(InputError, match="OverflowError"):
            client.request(client.connections[0], "push", endless).result()
        with pytest.raises(SequenceError, match="rows must be at most"):
            client.push(0, 10**400, gradients={"a": ONES, "b": ONES}).result()
        assert client.push(0, 1, gradients={"a": ONES, "b": ONES}).result() == "applied"


def test_what_cannot_be_written_down_is_not_waited_for():
    with servers() as addresses, clients(addresses) as (client,):
        with pytest.raises(TypeError, match="plain values"):
            client.request(client.connections[0], "push", {"shard": object()})
        assert not client.connections[0].pending


@pytest.mark.parametrize("mode", ["async", "bounded", "sync"])
@pytest.mark.parametrize("bad", ["a", "b"])
def test_what_one_of_two_servers_refuses_the_other_has_not_applied(mode: str, bad: str):
    with servers(2, mode=mode) as addresses, clients(addresses) as (client,):
        plan = client.define(MODEL, updater=PLAIN)
        assert {piece.server for piece in plan.pieces} == {0, 1}
        gradients = {"a": ONES, "b": ONES}
        with pytest.raises(NotFinite, match=f"variable '{bad}'"):
            client.push(0, 1, gradients={**gradients, bad: ONES * np.nan}).result()
        assert client.last_applied() == -1
        assert client.push(0, 1, gradients=gradients).result() == "applied"
        client.pull().result()
        for name in ("a", "b"):
            np.testing.assert_array_equal(client.values[name], -ONES)


def test_what_one_of_two_servers_clips_is_applied_by_both():
    with servers(2, nan="clip") as addresses, clients(addresses) as (client,):
        client.define(MODEL, updater=PLAIN)
        assert client.push(0, 1, gradients={"a": ONES, "b": ONES * np.nan}).result() == "applied"
        client.pull().result()
        np.testing.assert_array_equal(client.values["a"], -ONES)
        np.testing.assert_array_equal(client.values["b"], 0 * ONES)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("part_of_a_step", [False, True])
def test_rows_of_a_table_are_refused_by_all_servers_or_none(transport: str, part_of_a_step: bool):
    with servers(2) as addresses, clients(addresses, transport=transport) as (client,):
        client.define({})
        client.define_tables([Table("words", 1, updater=PLAIN, initializer="constant")])
        keys, rows = np.arange(16), np.ones((16, 1), np.float32)
        for wrong in (0, 7):
            rows[wrong] = np.nan
            with pytest.raises(NotFinite, match="words"):
                if part_of_a_step:
                    client.push(0, 1, tables={"words": (keys, rows)}).result()
                else:
                    client.push_rows("words", keys, rows, 0).result()
            np.testing.assert_array_equal(client.pull_rows("words", keys).result(), np.zeros((16, 1)))
            rows[wrong] = 1
        assert client.push_rows("words", keys, rows, 0).result() == "applied"
        np.testing.assert_array_equal(client.pull_rows("words", keys).result(), -rows)


def test_a_definition_for_which_there_is_no_memory_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    with servers() as addresses, clients(addresses) as (client,):
        with monkeypatch.context() as patch:

            def none_left(*_: Any) -> None:
                raise MemoryError("none left")

            patch.setattr(server_state, "aligned_empty", none_left)
            with pytest.raises(InputError, match="none left"):
                client.define(MODEL)
        client.define({"another": MODEL["a"]})
        assert client.push(0, 1, gradients={"another": ONES}).result() == "applied"


def test_variables_may_be_defined_again_as_they_are():
    with servers(2) as addresses, clients(addresses) as (client,):
        with pytest.raises(InputError, match="'a' is float32"):
            client.define({**MODEL, "a": ((4,), "float32", np.zeros(5, np.float32))})
        client.define(MODEL, updater="sgd")
        client.define(MODEL, updater="sgd")
        client.pull().result()
        assert client.push(0, 1, gradients={"a": ONES, "b": ONES}).result() == "applied"


def test_addresses_in_another_order_are_told_of():
    with servers(2) as addresses:
        with pytest.raises(ParameterError, match=r"in the order of their indices.*where server 1 is"):
            connect(addresses[::-1], secret=SECRET, timeout=30.0)
        with pytest.raises(ParameterError, match=r"server 1: .* where server 0 is"):
            connect([addresses[0]] * 2, secret=SECRET, timeout=30.0)


def test_a_secret_is_bytes():
    with pytest.raises(InputError, match=r"secret must be bytes\. Received: str"):
        ParameterServer(secret="text")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"secret must be bytes\. Received: str"):
        connect(["127.0.0.1:1"], secret="text")  # type: ignore[arg-type]


def test_a_server_that_was_lost_is_looked_for_by_each_request():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ParameterServer())
        client = stack.enter_context(connect([server.address], timeout=0.2, stall_timeout=3.0))
        client.define(MODEL)
        server.stop()
        for _ in range(2):
            with pytest.raises(ServerLost, match="isn't found again"):
                client.pull().result()
        stack.enter_context(ParameterServer(server.address))
        with pytest.raises(ServerLost, match="started anew"):
            client.pull().result()


def test_a_server_stopped_twice_writes_to_nobody_else():
    server = ParameterServer().start()
    number = server._loop._wake_in
    server.stop()
    read, write = os.pipe2(os.O_NONBLOCK)
    own = os.dup2(write, number) if write != number else number
    try:
        server.stop()
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        for file in {read, write, own}:
            os.close(file)


def test_a_checkpoint_that_one_server_cannot_begin_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reached, done, write = threading.Event(), threading.Event(), checkpoints.write

    def slow(folder: Path, *given: Any) -> None:
        if folder.name == "server-1":
            reached.set()
            assert done.wait(DEADLINE)
        write(folder, *given)

    monkeypatch.setattr(checkpoints, "write", slow)
    # Less than a server stays frozen at most.
    with servers(2) as addresses, clients(addresses, 1, stall_timeout=5.0) as (client,):
        client.define(MODEL)
        writing = client.checkpoint(tmp_path)
        assert reached.wait(DEADLINE)
        while 0 not in finished(tmp_path):
            client.stats()
        with pytest.raises(ParameterError, match="under way"):
            client.checkpoint(tmp_path)
        assert client.push(0, 1, gradients={"a": ONES, "b": ONES}).result() == "applied"
        done.set()
        assert writing.result(DEADLINE) == 1


def finished(folder: Path) -> set[int]:
    return {
        server for server in (0, 1) if checkpoints.list_numbers(checkpoints.server_folder(folder, server))
    }


def test_strangers_who_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_loop, "_MAX_HANDSHAKES", 4)
    with ParameterServer() as server, contextlib.ExitStack() as stack:
        host, port = server.address.split(":")
        for _ in range(8):
            stack.enter_context(socket.create_connection((host, int(port))))
        with connect([server.address], timeout=2.0) as client:
            client.define(MODEL)
