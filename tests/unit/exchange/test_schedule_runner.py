"""Running schedules: compiled code and Python give the same bits and the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_sessions import run_together, tcp_sessions

from insitu.exchange.algorithms import ALGORITHMS
from insitu.exchange.plan.transport import Mismatch, Reduction

SHARDS = [[0, 2], [1], []]


def _make_rows(length: int) -> np.ndarray:
    return np.random.default_rng(length).standard_normal((3, length)).astype(np.float32)


@pytest.mark.parametrize("compiled", ["all", "some", "none"])
@pytest.mark.parametrize("length", [10, 100_000])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_result_does_not_depend_on_the_compiler(name: str, length: int, compiled: str) -> None:
    shards = [[0], [1, 2], []] if name == "chain" else SHARDS
    rows = _make_rows(length)
    want = (rows[0] + rows[1]) + rows[2]
    with tcp_sessions(shards, compiled=compiled != "none") as sessions:
        if compiled == "some":
            sessions[1].kernels = None
        runs, targets = [], []
        for session, own in zip(sessions, shards, strict=True):
            target = np.empty(length, np.float32)
            reduction = Reduction("sum", target.dtype, length, tuple(rows[own].copy()), target)
            runs.append(ALGORITHMS[name](session, reduction, target).run)
            targets.append(target)
        for _ in range(3):
            assert run_together([lambda r=r: r(None) for r in runs]) == [True] * 3
            assert [target.tobytes() for target in targets] == [want.tobytes()] * 3
            for target in targets:
                target[:] = 0


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", ["gather", "star", "direct"])
def test_zero_weights_return_false_and_copy_nothing(name: str, compiled: bool) -> None:
    with tcp_sessions([[0], [1]], compiled=compiled) as sessions:
        arrays = [np.full(40_000, rank, np.float32) for rank in range(2)]
        runs = [
            ALGORITHMS[name](s, Reduction("weighted_mean", a.dtype, a.size, (a,), a), np.empty_like(a)).run
            for s, a in zip(sessions, arrays, strict=True)
        ]
        assert run_together([lambda r=r: r([0.0]) for r in runs]) == [False, False]
        assert all((array == rank).all() for rank, array in enumerate(arrays))
        assert run_together([lambda r=r: r([1.0]) for r in runs]) == [True, True]


@pytest.mark.parametrize("compiled", [True, False])
def test_another_operation_of_a_peer_raises(compiled: bool) -> None:
    with tcp_sessions([[0], [1]], compiled=compiled) as sessions:
        runs = []
        for session, op in zip(sessions, ("sum", "mean"), strict=True):
            array = np.zeros(10, np.float32)
            reduction = Reduction(op, array.dtype, 10, (array,), array)  # type: ignore[arg-type]
            runs.append(ALGORITHMS["gather"](session, reduction, array).run)
        results = run_together([lambda r=r: r(None) for r in runs])
    assert all(isinstance(result, Mismatch) for result in results)
