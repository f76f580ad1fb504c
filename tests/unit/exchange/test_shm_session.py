"""The state that the members of one host share."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_sessions import run_together, shm_sessions

from insitu.base.errors import ExchangeError
from insitu.exchange.plan.transport import MemberLost, Mismatch
from insitu.exchange.shm_session import sign

SHARDS = [[0, 2], [1]]


def test_agree_returns_false_if_only_the_places_differ() -> None:
    with shm_sessions(SHARDS) as sessions:
        results = run_together([lambda n=n, s=s: s.agree(n, lambda: "sum") for n, s in enumerate(sessions)])
        assert results == [False, False]
        results = run_together([lambda s=s: s.agree(7, lambda: "sum") for s in sessions])
        assert results == [True, True]


def test_synchronize_raises_if_places_or_operations_differ() -> None:
    with shm_sessions(SHARDS) as sessions:
        results = run_together(
            [lambda n=n, s=s: s.synchronize(n, lambda: "sum") for n, s in enumerate(sessions)]
        )
        assert all(isinstance(r, ExchangeError) and "different buffers" in str(r) for r in results)
        results = run_together(
            [lambda n=n, s=s: s.synchronize(sign(n), lambda: n) for n, s in zip("ab", sessions, strict=True)]
        )
        assert all(isinstance(r, Mismatch) for r in results)
        assert all("rank 0 called a" in str(r) or "rank 1 called b" in str(r) for r in results)


def test_buffers_are_mapped_by_all_members() -> None:
    with shm_sessions(SHARDS) as sessions:
        arrays = run_together([lambda s=s: s.allocate_buffer(5000) for s in sessions])
        arrays[0][:] = 3
        assert (sessions[1].get_buffer(0).parts[0] == 3).all()
        assert sessions[0].find_buffer(arrays[0][100:]) == (0, 100)
        assert sessions[0].find_buffer(np.zeros(3)) is None
        sessions[1].make_buffers_private()
        sessions[0].get_buffer(0).parts[1][:] = 9
        assert not arrays[1].any(), "another process changed a private buffer"


def test_weights_are_read_after_the_phase() -> None:
    def run(session: object, weights: list[float]) -> object:
        session.publish_weights(weights)  # type: ignore[attr-defined]
        session.synchronize(1, lambda: "weights")  # type: ignore[attr-defined]
        return session.read_factors(weights, np.dtype(np.float64))  # type: ignore[attr-defined]

    with shm_sessions(SHARDS) as sessions:
        results = run_together([lambda: run(sessions[0], [1.0, 2.0]), lambda: run(sessions[1], [1.0])])
    assert results == [[0.25, 0.25, 0.5]] * 2


def test_loss_makes_buffers_private() -> None:
    dead: list[int] = []
    with shm_sessions(SHARDS, find_dead=lambda: dead) as sessions:
        arrays = run_together([lambda s=s: s.allocate_buffer(100) for s in sessions])
        dead.append(1)
        with pytest.raises(MemberLost):
            sessions[0].synchronize(1, lambda: "sum")
        sessions[1].get_buffer(0).parts[0][:] = 9
        assert not arrays[0].any()
