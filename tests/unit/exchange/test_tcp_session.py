"""Headers and weights of operations over TCP."""

from __future__ import annotations

from exchange_sessions import run_together, tcp_sessions

from insitu.exchange.plan.transport import Mismatch
from insitu.exchange.tcp_session import TcpSession

SHARDS = [[0, 3], [], [1, 2]]


def _run(session: TcpSession, label: str, weights: list[float] | None = None) -> list[float]:
    session.begin_weighted(label, weights)
    session.run_until(session.is_complete)
    return session.collect_weights()


def test_weights_of_all_shards_arrive_in_shard_order() -> None:
    with tcp_sessions(SHARDS) as sessions:
        own = [[1.0, 4.0], [], [2.0, 3.0]]
        results = run_together(
            [lambda s=s, w=w: _run(s, "mean", w) for s, w in zip(sessions, own, strict=True)]
        )
    assert results == [[1.0, 2.0, 3.0, 4.0]] * 3
    assert [session.sequence for session in sessions] == [1, 1, 1]
    assert list(sessions[1].get_weights(2)) == [2.0, 3.0]


def test_another_label_is_a_mismatch_on_all_members() -> None:
    with tcp_sessions(SHARDS) as sessions:
        labels = ["sum", "sum", "mean"]
        results = run_together([lambda s=s, t=t: _run(s, t) for s, t in zip(sessions, labels, strict=True)])
    assert all(isinstance(result, Mismatch) for result in results)
    # Whichever header arrives first.
    assert any(f"rank 2 called mean, rank {peer} called sum" in str(results[2]) for peer in (0, 1))


def test_another_number_of_operations_is_a_mismatch() -> None:
    with tcp_sessions([[0], [1]]) as sessions:
        sessions[0].next_sequence()
        results = run_together([lambda s=s: _run(s, "sum") for s in sessions])
    assert all(isinstance(result, Mismatch) for result in results)


def test_headers_of_repeated_operations_have_room_for_the_number() -> None:
    with tcp_sessions([[0], [1]]) as (first, second):
        own, others = first.make_headers("sum", [1])
        number = second.next_sequence()
        own[4:12] = list(number.to_bytes(8, "big"))
        assert own.tobytes() == second._pack_header("sum")
        assert [header.nbytes for header in others] == [own.nbytes]
