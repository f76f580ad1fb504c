"""Rows of tables, over each transport."""

from __future__ import annotations

import numpy as np
import pytest
from parameter_servers import MODEL, ONES, PLAIN, TRANSPORTS, clients, servers

from insitu.base.errors import (
    DefinitionMismatch,
    InputError,
    NotFinite,
)
from insitu.parameters import Table


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_pulled_pushed_read_and_loaded(transport: str, count: int):
    with servers(count) as addresses, clients(addresses, transport=transport) as (client,):
        client.define_tables([Table("words", 8, updater={"name": "sgd", "learning_rate": 1.0}, seed=3)])
        keys = np.array([5, -9, 5, 2**62, 0])
        before = client.pull_rows("words", keys).result()
        np.testing.assert_array_equal(before[0], before[2])
        assert len({row.tobytes() for row in before}) == 4
        ones = np.ones((5, 8), "f4")
        assert client.push_rows("words", keys, ones, 0).result() == "applied"
        client.push_rows("words", keys, ones, 0).result()
        after = client.pull_rows("words", keys).result()
        np.testing.assert_allclose(before - after, np.array([2, 1, 2, 1, 1])[:, None] * ones, rtol=1e-6)
        assert client.last_applied(table="words") == 0
        client.pull_rows("words", np.array([77]), create=False).result()
        read = {
            int(k): row
            for ks, rows in client.read_rows("words", block=2)
            for k, row in zip(ks, rows, strict=True)
        }
        assert sorted(read) == sorted({5, -9, 2**62, 0})
        np.testing.assert_array_equal(read[5], after[0])
        client.load_rows("words", [5, 6], np.zeros((2, 8))).result()
        assert not client.pull_rows("words", [6, 5]).result().any()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pulled_rows_stay_valid(transport: str):
    """Also once other rows have been, and the client is gone."""
    with servers() as addresses, clients(addresses, transport=transport) as (client,):
        client.define_tables([Table("t", 64)])
        keys = [np.arange(low, low + 20_000) for low in range(0, 100_000, 20_000)]
        found = [client.pull_rows("t", some).result() for some in keys]
        again = [client.pull_rows("t", some, out=np.empty((20_000, 64), "f4")).result() for some in keys]
        client.push_rows("t", keys[0], np.ones((20_000, 64), "f4"), 0).result()
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, other)
        one += 1  # they are the caller's


def test_bad_keys_are_refused():
    with servers() as addresses, clients(addresses) as (client,):
        client.define_tables([Table("t", 4)])
        for keys, message in (
            (np.array([1.5]), "Keys must be integers"),
            (np.array([2**63], np.uint64), "must fit into int64. Received: 9223372036854775808"),
            (np.array([[1]]), "Keys must be integers"),
        ):
            with pytest.raises(InputError, match=message):
                client.pull_rows("t", keys)
        with pytest.raises(InputError, match="'u'"):
            client.pull_rows("u", [1])
        with pytest.raises(NotFinite, match="table 't'"):
            client.push_rows("t", [1], np.full((1, 4), np.inf, "f4"), 0).result()
        with pytest.raises(DefinitionMismatch, match="table 't'"):
            client.define_tables([Table("t", 5)])


def test_numpy_scalars_are_accepted():
    with servers(2) as addresses, clients(addresses) as (client,):
        client.define(MODEL, updater=PLAIN)
        client.define_tables([Table("words", np.int64(2), seed=np.int64(5))])  # type: ignore[arg-type]
        gradients = {"a": ONES, "b": ONES}
        assert client.push(np.int64(0), np.int32(3), gradients=gradients).result() == "applied"
        rows = np.ones((1, 2), np.float32)
        assert client.push_rows("words", [7], rows, np.int64(0)).result() == "applied"  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("part_of_a_step", [False, True])
def test_bad_rows_are_applied_by_no_server(transport: str, part_of_a_step: bool):
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
