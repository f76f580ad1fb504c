"""Looks at systems that may be silent."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from insitu.base.errors import InputError
from insitu.ui import looks
from insitu.ui.looks import Look, Looks


def get(found: Looks, read: Any, subject: str = "a") -> Look:
    return asyncio.run(found.get(subject, read, "It doesn't answer"))


def test_what_is_found_is_shown_to_others_for_a_moment() -> None:
    found, calls = Looks(), list[int]()
    for _ in range(3):
        look = get(found, lambda: calls.append(1) or len(calls))
        assert (look.found, look.problem) == (1, "") and look.at > 0
    assert calls == [1]


def test_a_silent_system_is_waited_for_a_moment_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "WAIT_SECONDS", 0.01)
    found, answers, calls = Looks(), threading.Event(), list[int]()

    def read() -> str:
        calls.append(1)
        answers.wait()
        return "there"

    for _ in range(3):
        look = get(found, read)
        assert look.found is None and look.problem == "It doesn't answer"
    assert calls == [1]
    monkeypatch.setattr(looks, "WAIT_SECONDS", 60)
    answers.set()
    assert get(found, read).found == "there"


def test_what_was_known_stays_while_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "FRESH", -1.0)
    found = Looks()
    get(found, lambda: "before")

    def fail() -> None:
        raise InputError("No rights")

    look = get(found, fail)
    assert (look.found, look.problem) == ("before", "No rights")

    def break_down() -> None:
        raise KeyError("x")

    assert get(found, break_down).problem == "KeyError: 'x'"
    assert get(found, lambda: "after").problem == ""


def test_few_hang_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(looks, "_AT_ONCE", 2)
    found, answers = Looks(), threading.Event()
    for subject in "abc":
        assert get(found, answers.wait, subject).problem == "It doesn't answer"
    assert sum(each.running is not None for each in found._looks.values()) == 2
    answers.set()
