"""The command line as a whole: exit codes, and what errors look like."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from insitu import cli
from insitu.base.errors import ClusterError, InputError, JobEnded


@pytest.fixture(autouse=True)
def sigpipe() -> Iterator[None]:
    """`main` sets the action for a whole process."""
    before = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, before)


def exit_code(monkeypatch: pytest.MonkeyPatch, app: Callable[[], Any]) -> object:
    monkeypatch.setattr(cli, "build_app", lambda: app)
    monkeypatch.setattr(cli, "_leave", sys.exit)  # the true one ends this process
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def failing(error: BaseException) -> Callable[[], Any]:
    def app() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code"), [(ClusterError("no room"), 1), (InputError("no room"), 2), (JobEnded("no room"), 3)]
)
def test_an_error_of_insitu_is_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    assert exit_code(monkeypatch, failing(error)) == code
    assert capsys.readouterr() == ("", "error: no room\n")


def test_a_lack_of_threads_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, failing(RuntimeError("can't start new thread"))) == 1
    assert "no more threads" in capsys.readouterr().err


def test_the_end_of_a_command_and_an_interrupt_have_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code(monkeypatch, lambda: None) == 0
    assert exit_code(monkeypatch, failing(KeyboardInterrupt())) == cli.INTERRUPTED == 130


def test_any_other_error_is_a_defect_and_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "build_app", lambda: failing(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main()


PROGRAM = """
import socket, sys
from insitu import cli

def app():
    sys.stdin.read()
    here, there = socket.socketpair()
    there.close()
    try:
        here.send(b"x")
    except BrokenPipeError:
        print("continues")

cli.build_app = lambda: app
cli.main()
"""


@pytest.mark.parametrize("is_read", [True, False])
def test_a_reader_that_has_gone_ends_the_process_quietly_and_a_peer_does_not(*, is_read: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        if not is_read:
            process.stdout.close()
        process.stdin.close()
        said = process.stdout.read() if is_read else ""
        found = said, process.stderr.read(), process.wait(60)
    assert found == (("continues\n", "", 0) if is_read else ("", "", -signal.SIGPIPE))
