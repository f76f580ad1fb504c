"""TensorBoards that the page starts."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("fastapi")

from insitu.errors import ClusterError, InputError
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


def test_one_that_does_not_start_is_an_error_with_its_words() -> None:
    boards = Boards(os.environ)
    with pytest.raises(ClusterError, match="no room"):
        boards.start("a", [sys.executable, "-c", "raise SystemExit('no room')"])
    assert boards.find("a") is None


def test_others_cannot_reach_it() -> None:
    check_reach("http://127.0.0.1:8780")
    with pytest.raises(InputError, match="ssh -L 6006"):
        check_reach("https://grid-1:8780")
