"""Processes that outlive the one that starts them."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import Paths
from insitu.cluster.wire import detached
from insitu.cluster.wire.detached import start_detached

PROGRAM = """
import json, os, sys
from insitu.cluster.wire.detached import report_ready
kind, ready = sys.argv[1], int(sys.argv[2])
given = sys.stdin.read()
if kind == "dies":
    sys.exit("an accident")
if kind == "silent":
    os.read(os.pipe()[0], 1)
report_ready(ready, {"error": "no room"} if kind == "fails" else {"given": given, "session": os.getsid(0)})
"""


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Nothing that a test has started outlives it."""
    yield
    for process in detached._started:
        process.wait(60)
    detached._started.clear()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "started_by_test.py").write_text(PROGRAM)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH"), *map(str, sys.path)])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return "started_by_test"


def start(home: Path, module: str, kind: str, seconds: float = 60) -> dict[str, object]:
    return start_detached(Paths(home), module, [kind], home / "x.log", seconds, "given\n")


def test_it_says_when_it_is_ready_in_a_session_of_its_own(home: Path, module: str) -> None:
    answer = start(home, module, "works")
    assert answer["given"] == "given\n" and answer["session"] != os.getsid(0)


def test_what_it_says_against_beginning_is_an_error(home: Path, module: str) -> None:
    with pytest.raises(ClusterError, match=r"^no room$"):
        start(home, module, "fails")


def test_one_that_dies_is_an_error_with_its_log(home: Path, module: str) -> None:
    with pytest.raises(ClusterError, match=r"or ended \(logs: .*x\.log\)"):
        start(home, module, "dies")
    assert "an accident" in (home / "x.log").read_text()
    assert (home / "x.log").stat().st_mode & 0o077 == 0


def test_one_that_says_nothing_is_ended(home: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    class Popen(detached.subprocess.Popen):  # type: ignore[misc,type-arg]
        def kill(self) -> None:
            killed.append(os.pidfd_open(self.pid))
            super().kill()

    monkeypatch.setattr(detached.subprocess, "Popen", Popen)
    with pytest.raises(ClusterError, match=r"said nothing within 0\.5 s"):
        start(home, module, "silent", 0.5)
    (descriptor,) = killed
    assert select.select([descriptor], [], [], 30)[0]
    os.close(descriptor)


def test_a_log_that_others_have_put_there_is_not_written_to(home: Path, tmp_path: Path) -> None:
    """In a shared home a link would have led anywhere that the victim may write to."""
    private = tmp_path / "private"
    private.write_text("mine")
    home.mkdir()
    (home / "x.log").symlink_to(private)
    with pytest.raises(ClusterError, match=r"A log is a file of the user.*x\.log.*Remove it"):
        detached.open_log(home / "x.log")
    (home / "x.log").unlink()
    os.mkfifo(home / "x.log")
    with pytest.raises(ClusterError, match="A log is a file"):
        detached.open_log(home / "x.log")
    assert private.read_text() == "mine"
