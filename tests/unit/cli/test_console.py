"""What the commands print with."""

from __future__ import annotations

import io
import sys

import pytest

from insitu.cli import console
from insitu.cli.console import OutputPrinter, format_duration, format_position, print_table, wants_colour


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def put_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in the place of stdout and stderr."""
    made = Terminal(io.BytesIO(), "utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return made


def test_where_a_task_is_before_it_trains_is_nowhere() -> None:
    assert format_position({"epoch": 1, "step": 16}) == "epoch 2 step 17"
    assert [format_position(None), format_position({"epoch": -1, "step": -1})] == ["-", "-"]


def test_durations_are_short() -> None:
    seconds = (-1, 0, 59.9, 60, 3599, 3600, 86_399, 86_400, 200_000)
    shown = [format_duration(s) for s in seconds]
    assert shown == ["0s", "0s", "59s", "1m00s", "59m59s", "1h00m", "23h59m", "1d0h", "2d7h"]


def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("A", "LONG"), [("wide cell", "1"), ("x", "")])
    assert capsys.readouterr().out == "A          LONG\nwide cell  1\nx\n"


def test_colour_is_for_terminals_whose_user_did_not_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_terminal(monkeypatch)
    assert wants_colour(terminal) and not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(terminal)


def test_each_task_has_a_colour_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_terminal(monkeypatch)
    printer = OutputPrinter(prefix=True)
    printer.print([b"[worker:0] a", b"[worker:1] b", b"[worker:0] \xff"])
    assert terminal.buffer.getvalue() == (  # type: ignore[attr-defined]
        b"\x1b[36m[worker:0]\x1b[0m a\n\x1b[32m[worker:1]\x1b[0m b\n\x1b[36m[worker:0]\x1b[0m \xff\n"
    )


def test_what_insitu_says_goes_to_stderr(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    OutputPrinter(prefix=False).print([b"[worker:0] a", b"[insitu] job finished"])
    assert capsysbinary.readouterr() == (b"a\n", b"[insitu] job finished\n")


def test_all_of_it_goes_to_stdout_where_that_is_asked_for(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    OutputPrinter(prefix=True, all_to_stdout=True).print([b"[worker:0] a", b"[insitu] job finished"])
    assert capsysbinary.readouterr() == (b"[worker:0] a\n[insitu] job finished\n", b"")


def test_errors_are_plain_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_error("wrong")
    assert capsys.readouterr().err == "error: wrong\n"


def test_errors_do_not_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_error("a\n\tb é \x1b[31m\x89PNG\r\0")
    assert capsys.readouterr().err == "error: a\n\tb é \\x1b[31m\\x89PNG\\r\\x00\n"


def test_tables_and_notices_do_not_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of columns come from files and servers, and cells from rows."""
    print_table(["a"], [["\x1b]52;c;bXk=\x07"], ["é\nb"]])
    console.print_notice("left out: \x1b[2J\n\tnext")
    found = capsys.readouterr()
    assert found.out == "a\n\\x1b]52;c;bXk=\\x07\né\\nb\n"
    assert found.err == "left out: \\x1b[2J\n\tnext\n"
