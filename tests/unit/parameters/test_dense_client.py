"""Pushing and pulling dense variables, in each mode and over each transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from parameter_servers import MODEL, ONES, TRANSPORTS, clients, definitions, gradients, servers

from insitu.base.errors import (
    InputError,
)
from insitu.exchange.plan.arithmetic import Reducer, compute_factors
from insitu.parameters import Table


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [1, 3])
def test_pushed_gradients_are_applied(transport: str, count: int):
    with servers(count) as addresses, clients(addresses, transport=transport) as (client,):
        model = definitions()
        plan = client.define(model, updater={"name": "sgd", "learning_rate": 0.5}, min_piece_bytes=2000)
        assert len({piece.server for piece in plan.pieces}) == count
        assert client.pull().result() == 0
        for name, (_, _, initial) in model.items():
            np.testing.assert_array_equal(client.values[name], initial)
        assert client.push(0, 32, gradients=gradients(1)).result() == "applied"
        assert client.pull().result() == 1
        for name, (_, _, initial) in model.items():
            np.testing.assert_array_equal(client.values[name], initial - np.float32(0.5) * gradients(1)[name])


def test_each_dtype_has_its_own_buffer():
    with servers(2) as addresses, clients(addresses) as (client,):
        client.define(
            {"a": ((3,), "float32", np.ones(3, "f4")), "b": ((5,), "float64", np.ones(5))}, updater="sgd"
        )
        client.push(0, 1, gradients={"a": np.ones(3, "f4"), "b": np.ones(5)}).result()
        client.pull().result()
        assert client.values["a"].dtype == np.float32
        np.testing.assert_allclose(client.values["b"], 0.99)
        with pytest.raises(InputError, match="name one group"):
            client.flat_values()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [1, 2])
def test_sync_has_the_bits_of_the_exchange_s_weighted_mean(transport: str, count: int):
    rows = [5, 0, 11]
    with (
        servers(count, mode="sync", total_replicas=3) as addresses,
        clients(addresses, 3, transport=transport) as workers,
    ):
        for client in workers:
            client.define(definitions(), updater={"name": "sgd", "learning_rate": 1.0}, min_piece_bytes=2000)
        for client in workers:
            client.pull().result()
        # The last shard's first: the order of arrival must not matter.
        pushed = [workers[shard].push(0, rows[shard], gradients=gradients(shard)) for shard in (2, 1, 0)]
        assert [push.result() for push in pushed] == ["applied"] * 3
        factors = compute_factors([float(r) for r in rows], np.dtype("float32"))
        for client in workers:
            assert client.pull().result() == 1
            for name, (shape, _, initial) in definitions().items():
                size = int(np.prod(shape))
                mean = np.empty(size, "f4")
                flat = [gradients(shard)[name].reshape(-1) for shard in range(3)]
                Reducer("weighted_mean", np.dtype("float32"), 3, size).reduce(flat, mean, factors)
                np.testing.assert_array_equal(client.values[name], initial - mean.reshape(shape))


@pytest.mark.parametrize("count", [1, 2])
def test_late_gradients_are_dropped_and_counted(count: int):
    with (
        servers(count, mode="sync", total_replicas=3, replicas_to_aggregate=2) as addresses,
        clients(addresses, 3) as workers,
    ):
        for client in workers:
            client.define(definitions(), min_piece_bytes=2000)
        for client in workers:
            client.pull().result()
        first = [workers[shard].push(0, 4, gradients=gradients(shard)) for shard in (2, 0)]
        assert [push.result() for push in first] == ["applied"] * 2
        assert workers[1].push(0, 6, gradients=gradients(1)).result() == "dropped"
        assert [client.pull().result() for client in workers] == [1, 1, 1]
        stats = workers[0].stats()
        assert (stats[0]["dropped"], stats[0]["dropped_rows"], stats[0]["dropped_by_shard"]) == (
            1,
            6,
            [[1, 6]],
        )
        assert {server["version"] for server in stats} == {1}
        again = [workers[shard].push(1, 4, gradients=gradients(shard)) for shard in (1, 2)]
        assert [push.result() for push in again] == ["applied"] * 2


def test_bounded_delays_the_fast_worker_until_the_slow_one_pushes():
    with (
        servers(mode="bounded", total_replicas=2, max_staleness=1) as addresses,
        clients(addresses, 2) as (fast, slow),
    ):
        for client in (fast, slow):
            client.define({"a": ((2,), "float32")})
            client.pull().result()
        for sequence in range(2):
            fast.push(sequence, 1, gradients={"a": np.ones(2, "f4")}).result()
        waiting = fast.pull()
        # One request that waits holds up no other.
        assert fast.last_applied() == 1
        assert not waiting.done()
        slow.push(0, 1, gradients={"a": np.ones(2, "f4")}).result()
        assert waiting.result() == 3
        assert slow.stats()[0]["staleness"]["largest"] == 2


def test_bad_pushes_are_refused_before_they_are_sent():
    with servers() as addresses, clients(addresses) as (client,):
        with pytest.raises(InputError, match="must be defined"):
            client.pull()
        client.define(definitions())
        with pytest.raises(InputError, match=r"'bias' is float32\[7\]. Received: float32\[8\]"):
            client.push(0, 1, gradients={**gradients(0), "bias": np.zeros(8, "f4")})
        with pytest.raises(InputError, match="Received: float64"):
            client.push(0, 1, gradients={**gradients(0), "bias": np.zeros(7)})
        with pytest.raises(InputError, match=r"Missing: \['scale'\]"):
            client.push(0, 1, gradients={n: g for n, g in gradients(0).items() if n != "scale"})
        with pytest.raises(InputError, match="shard must be one of"):
            client.push(0, 1, shard=7)


def test_rows_of_tables_are_part_of_a_sync_step():
    with servers(2, mode="sync", total_replicas=2) as addresses, clients(addresses, 2) as workers:
        for client in workers:
            client.define({"a": ((2,), "float32")}, updater={"name": "sgd", "learning_rate": 1.0})
            client.define_tables(
                [Table("t", 4, initializer="constant", updater={"name": "sgd", "learning_rate": 1.0})]
            )
            client.pull().result()
        pushed = [
            client.push(
                0,
                rows,
                gradients={"a": np.full(2, value, "f4")},
                tables={"t": (np.array([3, 3, rank]), np.full((3, 4), value, "f4"))},
            )
            for rank, (client, rows, value) in enumerate(zip(workers, (1, 3), (4.0, 8.0), strict=True))
        ]
        assert [push.result() for push in pushed] == ["applied"] * 2
        rows = workers[0].pull_rows("t", [3, 0, 1]).result()
        np.testing.assert_allclose(rows[:, 0], [-(2 * 1 + 2 * 6), -1, -6])


@pytest.mark.parametrize("wrong", [0.5, float("inf"), "0", None])
def test_counts_must_be_whole_numbers(wrong: Any):
    with servers(2) as addresses, clients(addresses) as (client,):
        client.define(MODEL)
        for counts in ({"sequence": wrong, "rows": 1}, {"sequence": 0, "rows": wrong}):
            with pytest.raises(InputError, match=f"whole numbers.*{wrong!r}"):
                client.push(**counts, gradients={"a": ONES, "b": ONES})
        assert client.last_applied() == -1


def test_variables_may_be_defined_again_unchanged():
    with servers(2) as addresses, clients(addresses) as (client,):
        with pytest.raises(InputError, match="'a' is float32"):
            client.define({**MODEL, "a": ((4,), "float32", np.zeros(5, np.float32))})
        client.define(MODEL, updater="sgd")
        client.define(MODEL, updater="sgd")
        client.pull().result()
        assert client.push(0, 1, gradients={"a": ONES, "b": ONES}).result() == "applied"
