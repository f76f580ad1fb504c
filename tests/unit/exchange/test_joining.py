"""`join`: arguments, and which transport is formed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from exchange_ranks import in_threads
from exchange_transports import forced_transport

from insitu import exchange
from insitu.base.errors import InputError


def test_auto_transport_depends_on_the_hosts() -> None:
    def run(rank: int, addresses: list[str]) -> str:
        threading.current_thread().name = f"rank {rank}"
        with exchange.join(rank, addresses) as group:
            return group.transport

    assert in_threads(3, run) == ["shm"] * 3
    with forced_transport("three hosts"):
        assert in_threads(3, run) == ["tcp"] * 3
        assert in_threads(5, run) == ["shm+tcp"] * 5


def test_numpy_integers_are_accepted() -> None:
    def run(rank: int, addresses: list[str]) -> tuple[int, ...]:
        mine = np.array([2 * rank, 2 * rank + 1])
        with exchange.join(np.int64(rank), addresses, shards=mine, num_shards=4) as group:  # type: ignore[arg-type]
            return group.buffer(np.prod([2, 3]), np.float32).shape

    assert in_threads(2, run) == [(6,), (6,)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": "text"},
        {"timeout": float("nan")},
        {"timeout": 0.0},
        {"stall_timeout": -1.0},
        {"num_shards": 0, "shards": ()},
        {"num_shards": -1, "shards": ()},
    ],
)
def test_invalid_arguments_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        exchange.join(0, ["127.0.0.1:1", "127.0.0.1:2"], **wrong)
