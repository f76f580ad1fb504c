"""A collective that XLA could not do is told of by the name of the task that is lost."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.base.errors import PeerLost


def lost() -> PeerLost:
    return PeerLost(
        "worker:1 ended", rank=1, task="worker:1", operation="barrier", sequence=0, last_completed=-1
    )


class Group:
    """Stands for the exchange of all tasks, in which worker:1 is lost or all are there."""

    def __init__(self, *, lost: bool) -> None:
        self.lost = lost
        self.barriers = 0

    def barrier(self) -> None:
        self.barriers += 1
        if self.lost:
            raise lost()


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An element for each time that JAX' own shutdown, which waits for all tasks, is called off."""
    from insitu.train.backends.jax.spmd import program

    calls: list[bool] = []
    monkeypatch.setattr(program, "skip_shutdown", lambda: calls.append(True))
    return calls


def reported(group: Any, error: Exception) -> Exception:
    """The error that comes out where `error` is raised inside."""
    from insitu.train.backends.jax.spmd.program import report_lost_peers

    with pytest.raises(Exception) as raised, report_lost_peers(group):
        raise error
    return raised.value


def test_a_failed_collective_names_the_lost_task(skipped: list[bool]) -> None:
    group = Group(lost=True)
    found = reported(group, ValueError("UNAVAILABLE: connection reset by peer"))
    assert isinstance(found, PeerLost) and "worker:1" in str(found)
    assert group.barriers == 1 and skipped


def test_a_failure_with_all_tasks_there_stays_what_it_was(skipped: list[bool]) -> None:
    error = ValueError("INTERNAL: out of memory")
    assert reported(Group(lost=False), error) is error


@pytest.mark.parametrize("text", ["shapes don't match", "the value is INTERNAL"])
def test_an_error_that_is_no_collective_s_is_not_looked_into(skipped: list[bool], text: str) -> None:
    group, error = Group(lost=True), ValueError(text)
    assert reported(group, error) is error
    assert group.barriers == 0 and not skipped


def test_a_single_task_has_nobody_to_lose(skipped: list[bool]) -> None:
    error = ValueError("UNAVAILABLE")
    assert reported(None, error) is error
    assert not skipped


def test_a_peer_that_the_exchange_lost_ends_the_process_without_jax(skipped: list[bool]) -> None:
    error = lost()
    assert reported(Group(lost=True), error) is error
    assert skipped == [True]
