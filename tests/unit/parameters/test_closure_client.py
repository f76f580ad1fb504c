"""Workers take closures from the first server, also where one of them or the server is lost."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from parameter_servers import DEADLINE, Servers, clients, servers

from insitu.base.errors import InputError
from insitu.parameters import ClosureClient

NOTHING = np.zeros(0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_results_sums_and_failures_reach_all() -> None:
    with servers(2) as addresses, clients(addresses, 2, shards=(0,)) as both:
        first, second = (ClosureClient(client, rank, 1) for rank, client in enumerate(both))
        assert (first.take(2), second.take(2), first.result(0)) == (0, 1, None)
        first.finish(0, b"zero", np.array([2.5]))
        assert second.result(0) == (b"zero", False) and first.take(2) == -1
        second.finish(1, b"why", NOTHING, failed=True)
        assert first.take(2) is None and first.result(1) == (b"why", True)
        for worker in (first, second):
            record = worker.join(0, 2, "f")
            assert (record.sums.tolist(), record.failed) == ([2.5], 1)
        with pytest.raises(InputError, match="another worker has scheduled 2"):
            first.join(0, 3, "f")


def test_a_closure_of_a_worker_that_is_gone_is_taken_by_another() -> None:
    with servers() as addresses, clients(addresses) as (survivor,):
        second = ClosureClient(survivor, 1, 1)
        with clients(addresses) as (lost,):
            assert ClosureClient(lost, 0, 1).take(1) == 0
            assert second.take(1) == -1
        until(lambda: second.take(1) == 0)


def test_the_queue_survives_its_server() -> None:
    with Servers(2, backups=1) as running, clients(running.addresses, backups=1) as (client,):
        until(lambda: all(server["mirrored"] for server in client.stats()))
        worker = ClosureClient(client, 0, 1)
        assert worker.take(3) == 0
        worker.finish(0, b"zero", np.array([1.0]))
        assert worker.take(3) == 1
        running.kill(0)
        assert worker.result(0) == (b"zero", False)
        worker.finish(1, b"one", np.array([1.0]))
        assert worker.take(3) == 2
        assert worker.join(0, 0, "").sums.tolist() == [2.0]
