"""What a server answers to requests, good and bad."""

from __future__ import annotations

import numpy as np
import pytest
from parameter_servers import MODEL, ONES, clients, definitions, gradients, servers

from insitu.base.errors import InputError, ParameterError, SequenceError, ServerStalled


def test_a_stalled_push_names_the_awaited_shards():
    with (
        servers(mode="sync", total_replicas=2, stall_timeout=0.3) as addresses,
        clients(addresses, 1) as (client,),
    ):
        client.define({"a": ((2,), "float32")})
        with pytest.raises(ServerStalled, match=r"for pushes of shards \[1\]"):
            client.push(0, 1, gradients={"a": np.ones(2, "f4")}).result()


def test_a_repeated_push_changes_nothing_and_a_gap_is_refused():
    with servers(2) as addresses, clients(addresses) as (client,):
        client.define(definitions(), min_piece_bytes=2000)
        for _ in range(2):
            assert client.push(0, 8, gradients=gradients(0)).result() == "applied"
        client.pull().result()
        for name, (_, _, initial) in definitions().items():
            np.testing.assert_array_equal(
                client.values[name], initial - np.float32(0.01) * gradients(0)[name]
            )
        assert client.last_applied() == 0
        assert client.stats()[0]["repeated"] == 1
        with pytest.raises(SequenceError, match="comes to sequence 1 next"):
            client.push(2, 8, gradients=gradients(0)).result()


def test_numbers_that_do_not_fit_fail_the_request_only():
    with servers(mode="sync") as addresses, clients(addresses) as (client,):
        client.define(MODEL)
        endless = {"shard": 0, "sequence": float("inf"), "step": 0, "rows": 1}
        with pytest.raises(InputError, match="OverflowError"):
            client.requests.request(client.requests.connections[0], "push", endless).result()
        with pytest.raises(SequenceError, match="rows must be at most"):
            client.push(0, 10**400, gradients={"a": ONES, "b": ONES}).result()
        assert client.push(0, 1, gradients={"a": ONES, "b": ONES}).result() == "applied"


def test_a_malformed_request_to_a_frozen_server_fails_alone():
    with servers() as addresses, clients(addresses) as (client,):
        client.define({"a": ((2,), "float32")})
        client.requests.request_all("freeze", {}).result()
        cut = {"number": 1, "cut": {"": [[0, 5]]}, "version": 0, "decisions": [], "directory": "/dev/null"}
        client.requests.request(client.requests.connections[0], "checkpoint", cut)
        for broken in ({"op": "push"}, {"op": "push", "shard": [], "sequence": 0}, {"op": ["push"]}):
            with pytest.raises(InputError, match="must have the fields of its operation"):
                client.requests.request(client.requests.connections[0], "push", broken).result()
        assert client.stats()[0]["version"] == 0


def test_an_unknown_operation_is_refused():
    with (
        servers() as addresses,
        clients(addresses) as (client,),
        pytest.raises(ParameterError, match=r"must be one of adjust, .* Received: 'shout'"),
    ):
        client.requests.request(client.requests.connections[0], "shout", {}).result()
