"""Values reach every rank of a group, and bytes and rows those of every shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exchange_ranks import in_threads

import insitu.exchange
from insitu.train.collectives import transfer
from insitu.train.collectives.gather import barrier_token, gather_bytes, gather_rows, gather_sizes
from insitu.train.collectives.transfer import all_gather_json, broadcast_value

SHARDS = ((0, 1), (2,))


def in_group(work: Any) -> list[Any]:
    """The results of `work(group)` on two ranks, which host two shards and one."""

    def rank(index: int, addresses: list[str]) -> Any:
        with insitu.exchange.join(
            index, addresses, shards=SHARDS[index], num_shards=3, timeout=40.0
        ) as group:
            return work(group)

    return in_threads(2, rank)


def test_a_value_is_broadcast_in_chunks_to_those_that_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1000)
    value = {"w": np.arange(999, dtype="float32").reshape(3, 333), "n": 7, "empty": np.zeros(0)}

    def work(group: Any) -> Any:
        dropped = broadcast_value(group, 1, value if group.rank == 1 else None, keep=group.rank == 1)
        return dropped, broadcast_value(group, 1, value if group.rank == 1 else None)

    (dropped, kept), _ = in_group(work)
    assert dropped is None and kept["n"] == 7 and kept["empty"].size == 0
    assert kept["w"].dtype == np.float32 and kept["w"].tolist() == value["w"].tolist()


def test_each_rank_contributes_json() -> None:
    assert (
        in_group(lambda group: all_gather_json(group, {"rank": group.rank}))
        == [[{"rank": 0}, {"rank": 1}]] * 2
    )
    with pytest.raises(ValueError, match="Received: 2002"):
        all_gather_json(None, "x" * 2000)  # type: ignore[arg-type]


def test_bytes_and_rows_of_unequal_length_are_gathered_by_shard() -> None:
    own = [[b"a", b""], [b"longer than a word"]]
    rows = [[np.array([[1, 2]], "i2"), None], [np.array([[3, 4], [5, 6], [7, 8]], "i2")]]

    def work(group: Any) -> Any:
        group.all_gather(barrier_token(group))
        outputs = [{"y": leaf} if leaf is not None else None for leaf in rows[group.rank]]
        return (
            gather_bytes(group, own[group.rank]),
            gather_rows(group, outputs, {"y": np.zeros((1, 2), "i2")})["y"].tolist(),
            gather_sizes(group, 10 + group.rank),
        )

    found = ([b"a", b"", b"longer than a word"], [[1, 2], [3, 4], [5, 6], [7, 8]], [10, 10, 11])
    assert in_group(work) == [found, found]
