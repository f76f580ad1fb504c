"""Questions about names on their way through an agent to its head, and what is said if there is none."""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Any

import pytest

from insitu.base.errors import ClusterError
from insitu.cluster.nodes import agent_files
from insitu.cluster.nodes.agent_files import HeadCalls
from insitu.cluster.wire.messages import Message


class Sent:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


class Asking:
    """One question, asked in a thread."""

    def __init__(self, calls: HeadCalls, left: float = 20.0) -> None:
        self.answer: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._ask, args=(calls, left))
        self._thread.start()

    def _ask(self, calls: HeadCalls, left: float) -> None:
        self.answer = calls.ask("look", {"path": "x", "left": left})

    def wait(self) -> dict[str, Any]:
        self._thread.join(30.0)
        return self.answer


def is_readable(calls: HeadCalls, seconds: float = 0.0) -> bool:
    return bool(select.select([calls], [], [], seconds)[0])


@pytest.fixture
def calls() -> HeadCalls:
    return HeadCalls(lambda: False)


def test_an_answer_comes_to_the_one_who_has_asked(calls: HeadCalls) -> None:
    calls.record_heard()
    first = Asking(calls)
    assert is_readable(calls, 10.0)
    sent = Sent()
    calls.send(sent)  # type: ignore[arg-type]
    second = Asking(calls)
    assert is_readable(calls, 10.0)
    calls.send(sent)  # type: ignore[arg-type]
    assert not is_readable(calls)
    one, other = sent.messages
    assert one["do"] == "names" and one["kind"] == "look" and one["fields"] == {"path": "x"}
    calls.record_answer({"do": "names", "number": other["number"], "answer": {"kind": "second"}})
    for wrong in ({}, {"number": 77, "answer": {}}, {"number": "1", "answer": {}}):
        calls.record_answer(wrong)
    calls.record_answer({"do": "names", "number": one["number"], "answer": {"kind": "first"}})
    assert (first.wait(), second.wait()) == ({"kind": "first"}, {"kind": "second"})


def test_without_a_head_the_answer_comes_at_once_and_says_since_when(
    calls: HeadCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> str:
        answer = calls.ask("look", {"left": 60.0})
        assert answer["waits"] is False
        return str(answer["away"])

    assert "the head wasn't heard since the agent began" in ask()
    calls.record_heard()
    asking = Asking(calls)
    assert is_readable(calls, 10.0)
    calls.record_lost()
    assert "connection" in asking.wait()["lost"]
    assert calls.ask("look", {"left": 60.0})["waits"] is True  # it may be connected again in a moment
    calls.send(Sent())  # type: ignore[arg-type]
    real = time.monotonic
    monkeypatch.setattr(agent_files.time, "monotonic", lambda: real() + 42.0)
    assert "the head was heard 42 s ago" in ask() and "insitu up" in ask()
    calls.record_heard()
    monkeypatch.setattr(agent_files.time, "monotonic", lambda: real() + 52.0)
    assert "the head was heard 10 s ago" in ask()  # connected, and silent


def test_who_asks_waits_if_another_head_may_come() -> None:
    assert HeadCalls(lambda: True).ask("look", {"left": 60.0})["waits"] is True


def test_a_head_that_gives_no_answer_in_time_and_too_many_questions(
    calls: HeadCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls.record_heard()
    assert "gave no answer" in calls.ask("look", {"left": 0.25})["lost"]
    sent = Sent()
    calls.send(sent)  # type: ignore[arg-type]
    assert not sent.messages  # nobody waits for it any more
    monkeypatch.setattr(agent_files, "MOST_WAITING", 1)
    asking = Asking(calls)
    assert is_readable(calls, 10.0)
    assert calls.ask("look", {}) == {"busy": True}
    calls.record_lost()
    asking.wait()
    with pytest.raises(ClusterError):
        calls.ask("look", {"left": "long"})
    os.close(calls.fileno())
