"""TensorBoards that the page starts."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

pytest.importorskip("fastapi")

from insitu.base.errors import ClusterError, InputError
from insitu.ui import boards as module
from insitu.ui.boards import Boards, check_reach

BOARD = """
import sys, time
print(f'TensorBoard 2 at http://127.0.0.1:{sys.argv[1]}/ (Press CTRL+C)', flush=True)
time.sleep(99)
"""


def board(port: int) -> list[str]:
    return [sys.executable, "-c", BOARD, str(port)]


def test_a_job_has_one_that_ends_with_the_server() -> None:
    boards = Boards(os.environ)
    assert boards.find("a") is None
    assert boards.start("a", board(7001)) == "http://127.0.0.1:7001/" == boards.start("a", board(7002))
    process = boards._running["a"][0]
    boards.close()
    assert process.poll() is not None and boards.find("a") is None


def test_the_oldest_ends_for_a_further_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2)
    boards = Boards(os.environ)
    for number, name in enumerate("abc"):
        boards.start(name, board(7001 + number))
    assert [boards.find(name) is not None for name in "abc"] == [False, True, True]
    boards.close()


def test_pages_are_shown_and_the_server_ends_while_one_starts() -> None:
    """Each page asks whether a job's TensorBoard runs, in the thread that serves all."""
    boards, errors = Boards(os.environ), list[Exception]()
    boards.start("b", board(7001))

    def start() -> None:
        try:
            boards.start("a", [sys.executable, "-c", "import time; time.sleep(99)"])
        except ClusterError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    deadline = time.monotonic() + 60
    while "a" not in boards._starting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not boards._lock.locked() and boards.find("a") is None and boards.find("b") is not None
    with pytest.raises(ClusterError, match="another start of a"):
        boards.start("a", board(7002))
    process = boards._starting["a"]
    boards.close()
    thread.join(60)
    assert process.poll() is not None and len(errors) == 1 and not boards._starting
    with pytest.raises(ClusterError):
        boards.start("c", board(7003))


def test_one_that_does_not_start_is_an_error_with_its_words() -> None:
    boards = Boards(os.environ)
    with pytest.raises(ClusterError, match="no room"):
        boards.start("a", [sys.executable, "-c", "raise SystemExit('no room')"])
    assert boards.find("a") is None


def test_others_cannot_reach_it() -> None:
    check_reach("http://127.0.0.1:8780")
    with pytest.raises(InputError, match="ssh -L 6006"):
        check_reach("https://grid-1:8780")
