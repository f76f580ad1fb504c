"""The records of the last updates."""

from __future__ import annotations

import numpy as np
from parameter_servers import clients, servers

from insitu.parameters.server_state import StepRecords


def records(*values: float) -> list[np.ndarray]:
    return [np.array([value, value]) for value in values]


def test_those_of_later_updates_are_found():
    kept = StepRecords()
    kept.add(0, records(1, 2))
    kept.add(1, [])
    kept.add(2, records(3))
    assert (kept.since(0)[0][:, 0].tolist(), kept.since(0)[1]) == ([1, 2, 3], 0)
    assert kept.since(1)[0].tolist() == [[3, 3]]
    assert kept.since(3)[0].size == 0


def test_the_oldest_are_forgotten_and_counted():
    kept = StepRecords(limit=40)
    for version in range(5, 9):
        kept.add(version, records(version))
    found, missing = kept.since(5)
    assert (found[:, 0].tolist(), missing) == ([7, 8], 2)
    assert kept.since(8)[1] == 0


def test_workers_get_those_of_all_pushes_that_entered_the_updates():
    define = {"w": ((1,), "float32", np.zeros(1, "float32"))}
    for count in (1, 2):
        rules = {"mode": "sync", "total_replicas": 3, "replicas_to_aggregate": 2}
        with servers(count, **rules) as addresses, clients(addresses, 3) as made:
            for client in made:
                client.define(define, updater="sgd")
                client.pull().result()
                client.follow_records()
            first, second, late = made

            def push(client, sequence: int, record: float) -> object:
                gradient = {"w": np.ones(1, "float32")}
                return client.push(sequence, 8, gradients=gradient, record=np.array([8.0, record]))

            pushes = [push(second, 0, 2), push(first, 0, 1)]
            assert [one.result() for one in pushes] == ["applied"] * 2
            assert push(late, 0, 3).result() == "dropped"
            for client in made:
                client.pull().result()
                found, missing = client.take_records()
                assert (found.tolist(), missing) == ([[8, 1], [8, 2]], 0)
                assert client.take_records()[0].size == 0
            pushes = [push(late, 1, 4), push(second, 1, 5)]
            assert [one.result() for one in pushes] == ["applied"] * 2
            first.pull().result()
            assert first.take_records()[0].tolist() == [[8, 5], [8, 4]]
