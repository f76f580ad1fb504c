"""Calls to several nodes at the same time: who is waited for, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from insitu.base.spec import NodeId
from insitu.cluster.files import asking
from insitu.cluster.files.asking import Suspects, ask_all, ask_first
from insitu.cluster.files.peers import Busy, Unreachable

A, B, C = map(NodeId, "abc")


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "HEDGE_SECONDS", 0.05)
    monkeypatch.setattr(asking, "BUSY_SECONDS", 0.0)


def answer(answers: dict[NodeId, Callable[[], str]], asked: list[NodeId]) -> Callable[[NodeId], str]:
    def call(node: NodeId) -> str:
        asked.append(node)
        return answers[node]()

    return call


def fail() -> str:
    raise Unreachable("no")


def test_the_next_is_asked_where_one_fails_or_is_silent_which_is_remembered() -> None:
    suspects, asked, end = Suspects(), list[NodeId](), threading.Event()
    answers: dict[NodeId, Callable[[], str]] = {A: lambda: str(end.wait(10.0)), B: fail, C: lambda: "c"}
    call = answer(answers, asked)
    assert ask_first([A, B, C], call, suspects, 5.0) == "c" and asked == [A, B, C]
    assert suspects.order([A, B, C]) == [C, A, B]
    asked.clear()
    assert ask_first(suspects.order([A, B, C]), call, suspects, 5.0) == "c" and asked == [C]
    end.set()
    with pytest.raises(Unreachable):
        ask_first([B], call, suspects, 5.0)
    assert ask_first([A], call, suspects, 5.0) == "True"
    assert suspects.order([A, B, C]) == [A, C, B]


def test_who_is_busy_is_asked_again_and_counts_as_alive() -> None:
    suspects, asked, times = Suspects(), list[NodeId](), iter(range(5))

    def be_busy() -> str:
        if next(times) < 3:
            raise Busy("busy")
        return "done"

    assert ask_first([A], answer({A: be_busy}, asked), suspects, 5.0) == "done" and asked == [A] * 4


def test_those_that_answer_are_not_held_up_by_one_that_is_silent() -> None:
    suspects, end = Suspects(), threading.Event()
    answers: dict[NodeId, Callable[[], str]] = {A: lambda: str(end.wait(10.0)), B: fail, C: lambda: "c"}
    found, failures = ask_all([A, B, C], answer(answers, []), suspects, 0.1)
    assert found == {C: "c"} and failures.keys() == {A, B}
    assert suspects.order([A, B, C]) == [C, A, B]
    end.set()


def test_the_last_error_is_raised_and_silence_ends() -> None:
    def refuse() -> str:
        raise FileNotFoundError("no")

    with pytest.raises(FileNotFoundError):
        ask_first([A, B], answer({A: fail, B: refuse}, []), Suspects(), 5.0)
    end = threading.Event()
    with pytest.raises(Unreachable):
        ask_first([A], answer({A: lambda: str(end.wait(10.0))}, []), Suspects(), 0.1)
    end.set()
