"""`Group.rejoin`: another size, other shards, and failures."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from exchange_ranks import in_threads
from free_ports import free_addresses

from insitu import exchange
from insitu.base.errors import ExchangeError, InputError, JoinTimeout, PeerLost, StaleGeneration
from insitu.exchange import Group

TRANSPORTS = ["shm", "tcp"]
LENGTH = 40_001
ROWS = np.random.default_rng(3).standard_normal((3, LENGTH)).astype(np.float32)
WANT = (ROWS[0] + ROWS[1] + ROWS[2]).tobytes()


def _reduce(group: Group) -> bytes:
    own = ROWS[list(group.shards)]
    buffer = group.buffer(own.shape if len(own) > 1 else LENGTH, np.float32)
    buffer[...] = own if len(own) > 1 else own[0]
    return group.all_reduce(buffer).tobytes()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rejoin_with_moved_shards_and_another_size(transport: str) -> None:
    """Three ranks; the second leaves and its shard moves; then it comes back, as the third."""
    left = threading.Event()

    def survive(rank: int, addresses: list[str]) -> list[bytes]:
        with exchange.join(rank, addresses, transport=transport, tasks=["a", "b", "c"]) as group:  # type: ignore[arg-type]
            results = [_reduce(group)]
            with pytest.raises(PeerLost, match=r"b (left|was lost)"):
                group.barrier()
            few = [addresses[0], addresses[2]]
            shards = [0, 1] if rank == 0 else [2]
            group.rejoin(1, few, rank=rank // 2, shards=shards, tasks=["a", "c"], keep_buffers=False)
            assert (group.size, group.rank, list(group.shards)) == (2, rank // 2, shards)
            assert group.task(1) == "c"
            results.append(_reduce(group))
            left.set()
            many = [addresses[0], addresses[2], addresses[1]]
            names = ["a", "c", "b"]
            group.rejoin(2, many, shards=[rank // 2 * 2], tasks=names, keep_buffers=False)
            return [*results, _reduce(group)]

    def come_and_go(rank: int, addresses: list[str]) -> list[bytes]:
        with exchange.join(rank, addresses, transport=transport, tasks=["a", "b", "c"]) as group:  # type: ignore[arg-type]
            first = _reduce(group)
        assert left.wait(30)
        addresses = [addresses[0], addresses[2], addresses[1]]
        names = ["a", "c", "b"]
        with exchange.join(2, addresses, transport=transport, shards=[1], tasks=names, generation=2) as group:  # type: ignore[arg-type]
            return [first, WANT, _reduce(group)]

    results = in_threads(3, lambda rank, names: (come_and_go if rank == 1 else survive)(rank, names))
    assert all(result == WANT for rank in results for result in rank)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buffers_survive_rejoin_with_other_shards(transport: str) -> None:
    """Nobody was lost: two ranks change their shards, and continue in the same buffers."""

    def run(rank: int, addresses: list[str]) -> bytes:
        with exchange.join(rank, addresses, transport=transport, shards=[rank]) as group:  # type: ignore[arg-type]
            buffer = group.buffer(LENGTH, np.float32)
            buffer[:] = ROWS[rank]
            group.rejoin(1, shards=[1 - rank])
            assert buffer.tobytes() == ROWS[rank].tobytes()
            buffer[:] = ROWS[1 - rank]
            return group.all_reduce(buffer).tobytes()

    assert in_threads(2, run) == [(ROWS[0] + ROWS[1]).tobytes()] * 2


def test_cancelled_rejoin_ends_at_once_and_can_be_repeated() -> None:
    newer = threading.Event()

    def run(rank: int, addresses: list[str]) -> float | bool:
        with exchange.join(rank, addresses) as group:
            if rank == 1:
                assert newer.wait(30)
                group.rejoin(2)
                return bool(group.all_reduce(np.ones(2))[0] == 2)
            threading.Timer(0.2, newer.set).start()
            with pytest.raises(StaleGeneration, match="cancelled"):
                group.rejoin(1, timeout=600, cancelled=newer.is_set)
            with pytest.raises(ExchangeError, match="broken"):
                group.barrier()
            group.rejoin(2, cancelled=lambda: False)
            return bool(group.all_reduce(np.ones(2))[0] == 2)

    assert in_threads(2, run) == [True, True]


def test_failed_rejoin_can_be_repeated() -> None:
    group = exchange.join(0, ["127.0.0.1:1"])
    with pytest.raises(InputError, match="greater than the last"):
        group.rejoin(0)
    for options in ({"shards": [0, 5]}, {"rank": 1}, {"tasks": ["a", "b"]}):
        with pytest.raises(InputError):
            group.rejoin(1, **options)  # type: ignore[arg-type]
    with pytest.raises(ExchangeError, match="broken"):
        group.barrier()
    with pytest.raises(JoinTimeout):
        group.rejoin(1, free_addresses(2), timeout=0.1)
    group.rejoin(1)
    group.barrier()
    assert group.generation == 1
