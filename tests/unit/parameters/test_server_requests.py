"""Requests to several servers, threads that wait, and lost servers."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from parameter_servers import DEADLINE, MODEL, ONES, PLAIN, clients, servers

from insitu.base.errors import (
    NotFinite,
    ParameterError,
    ServerLost,
)
from insitu.parameters import ParameterServer, Table, connect


def test_several_threads_may_wait_at_once():
    with (
        servers(mode="bounded", total_replicas=2, max_staleness=0) as addresses,
        clients(addresses, 2) as (one, two),
    ):
        one.define({"a": ((2,), "float32")})
        one.define_tables([Table("t", 4)])
        two.define({"a": ((2,), "float32")})
        one.pull().result()
        one.push(0, 1, gradients={"a": np.ones(2, "f4")}).result()
        waiter = threading.Thread(target=lambda: one.pull().result())
        waiter.start()
        for key in range(20):
            one.pull_rows("t", [key]).result()
        two.push(0, 1, gradients={"a": np.ones(2, "f4")}).result()
        waiter.join(30)
        assert not waiter.is_alive()


def test_a_lost_server_is_named():
    with servers() as addresses, clients(addresses) as (client,):
        client.define({"a": ((2,), "float32")})
    with pytest.raises(ParameterError, match="closed"):
        client.pull()
    with ParameterServer() as server:
        client = connect([server.address], timeout=0.3)
        client.define({"a": ((2,), "float32")})
    with (
        client,
        pytest.raises(ServerLost, match=f"isn't found again at {server.address}") as caught,
    ):
        client.pull().result()
    assert caught.value.server == 0


def test_how_long_a_lost_server_is_looked_for_can_be_cut_short():
    with ParameterServer() as server:
        client = connect([server.address], timeout=600.0)
        client.define({"a": ((2,), "float32")})
    client.requests.limit_search(0.1)
    client.requests.limit_search(300.0)  # never longer again
    with client, pytest.raises(ServerLost, match="isn't found again"):
        client.pull().result()


@pytest.mark.parametrize("mode", ["async", "bounded", "sync"])
@pytest.mark.parametrize("bad", ["a", "b"])
def test_a_push_that_one_server_refuses_is_applied_by_none(mode: str, bad: str):
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


def test_each_request_looks_again_for_a_lost_server():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ParameterServer())
        client = stack.enter_context(connect([server.address], timeout=0.2, stall_timeout=3.0))
        client.define(MODEL)
        server.stop()
        for _ in range(2):
            with pytest.raises(ServerLost, match="isn't found again"):
                client.pull().result()
        stack.enter_context(ParameterServer(server.address))
        client.requests._timeout = DEADLINE
        with pytest.raises(ServerLost, match="started again"):
            client.pull().result()
