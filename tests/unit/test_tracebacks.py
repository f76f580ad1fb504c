"""Tracebacks that end a script show the user's lines."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from insitu.base.errors import InputError
from insitu.train.strategies import base
from insitu.train.strategies.base import shorten_printed_tracebacks, shorten_traceback


def run_in(folder: Path, name: str, text: str) -> dict[str, Any]:
    """Run `text` as if it stood in a file of `folder`."""
    path = folder / name
    path.write_text(text)
    module: dict[str, Any] = {"InputError": InputError}
    exec(compile(text, str(path), "exec"), module)
    return module


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls a function through one that stands for insitu's; returns the functions of the traceback."""
    (tmp_path / "insitu").mkdir()
    monkeypatch.setattr(base, "_OWN", f"{tmp_path}/insitu/")
    own = run_in(
        tmp_path / "insitu",
        "own.py",
        "def run(function):\n    return inner(function)\n\ndef inner(function):\n    return function()\n\n"
        "def refuse():\n    raise InputError('Received: it')\n\ndef fail():\n    raise KeyError(1)\n",
    )

    def call(what: Any) -> list[str]:
        try:
            own["run"](own[what] if isinstance(what, str) else what)
        except Exception as error:
            shorten_traceback(error)
            return [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        raise AssertionError("no error")

    return call


def test_frames_before_a_line_of_the_users_are_left_out(call: Any) -> None:
    def step() -> None:
        raise ValueError("of the user's")

    assert call(step) == ["call", "step"]


def test_a_refusal_ends_in_the_line_to_change_and_a_defect_in_its_own(call: Any) -> None:
    assert call("refuse") == ["call"]
    assert call("fail") == ["call", "run", "inner", "fail"]


def test_what_an_error_was_raised_from_is_shortened_too() -> None:
    def step() -> None:
        raise ValueError("of the user's")

    try:
        try:
            step()
        except ValueError as cause:
            raise RuntimeError("again") from cause
    except RuntimeError as error:
        shorten_traceback(error)
        assert isinstance(error.__cause__, ValueError) and error.__cause__.__traceback__ is not None
        error.__cause__.__cause__ = error  # a chain that comes back to its start
        shorten_traceback(error)


def test_python_prints_them_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: printed.append(args))
    shorten_printed_tracebacks()
    hook = sys.excepthook
    shorten_printed_tracebacks()
    assert sys.excepthook is hook
    error = ValueError("x")
    hook(ValueError, error, None)
    assert printed == [(ValueError, error, None)]
    monkeypatch.setattr(sys, "excepthook", print)
    monkeypatch.setenv("INSITU_FULL_TRACEBACKS", "1")
    shorten_printed_tracebacks()
    assert sys.excepthook is print
