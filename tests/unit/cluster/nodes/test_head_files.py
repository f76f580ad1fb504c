"""What the head answers about names, in threads of its own, and which metadata store it opens."""

from __future__ import annotations

import contextlib
import secrets
import select
import threading
import time
from pathlib import Path

import pytest
from memory_metadata import MemoryMetadata

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.cluster.nodes import head_files
from insitu.cluster.nodes.head_files import HeadFiles, open_head_files
from insitu.cluster.wire.messages import Message
from insitu.cluster.wire.records import change_head, read_head
from insitu.grid.shared_files import make_origin, read_state
from insitu.metadata import open_store
from insitu.metadata.interface import find_deadline

TOKEN = "t" * 32


def take(files: HeadFiles, callers: range = range(100)) -> list[tuple[int, Message]]:
    assert select.select([files], [], [], 10.0)[0]
    return files.take_answers(callers)


def ask(number: int, kind: str = "volumes", left: float = 5.0, **fields: object) -> Message:
    return {"do": "names", "number": number, "kind": kind, "fields": fields, "left": left}


def test_questions_are_answered_each_to_its_caller() -> None:
    files = HeadFiles(MemoryMetadata(), TOKEN)
    files.begin(1, ask(7, "folder", volume="v", path="x", change=secrets.token_hex(16)))
    assert take(files) == [(1, {"do": "names", "number": 7, "answer": {}})]
    files.begin(2, ask(8))
    assert take(files) == [(2, {"do": "names", "number": 8, "answer": {"volumes": ["v"]}})]
    for number, wrong in enumerate((ask(1, "folder", volume="..", path="x"), ask(1, "nothing", volume="v"))):
        files.begin(number, wrong)
        ((caller, message),) = take(files)
        assert caller == number and "refused" in message["answer"]
    files.begin(3, ask(9, left=-1.0))
    assert "no time" in take(files)[0][1]["answer"]["lost"]
    files.begin(5, ask(10))
    assert take(files, range(5)) == []  # who has asked is gone
    with pytest.raises(ClusterError):
        files.begin(1, {"do": "names", "left": "long"})
    files.close()


def test_a_head_with_too_much_to_do_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_files, "MOST_PENDING", 1)
    store, release = MemoryMetadata(), threading.Event()
    store.before = lambda call: release.wait(10.0) and None
    files = HeadFiles(store, TOKEN)
    files.begin(1, ask(1))
    files.begin(2, ask(2))
    assert take(files) == [(2, {"do": "names", "number": 2, "answer": {"busy": True}})]
    release.set()
    assert take(files)[0][0] == 1
    files.close()


def test_a_silent_store_is_given_up_before_the_agent_gives_up_the_head() -> None:
    store, left = MemoryMetadata(), list[float]()
    store.before = lambda call: left.append(find_deadline(5.0) - time.monotonic())
    files = HeadFiles(store, TOKEN)
    files.begin(1, ask(1, left=4.0))
    assert "volumes" in take(files)[0][1]["answer"]
    assert left and all(0 < each <= 3.0 for each in left)
    assert find_deadline(60.0) > time.monotonic() + 50.0, "only of that thread, and that question"
    files.close()


def test_a_failure_within_the_head_is_an_answer_too() -> None:
    store = MemoryMetadata()

    def fail(call: str) -> None:
        raise ZeroDivisionError

    store.before = fail
    files = HeadFiles(store, TOKEN)
    files.begin(1, ask(1))
    assert "its log says why" in take(files)[0][1]["answer"]["lost"]
    files.close()


def test_a_metadata_store_that_was_lost_is_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    record = change_head(paths, epoch=1)
    files = open_head_files(paths, record, TOKEN)
    files.begin(1, ask(1, "folder", volume="v", path="x", change=secrets.token_hex(16)))
    take(files)
    files.close()
    record = read_head(paths)
    assert record is not None and record.has_metadata
    again = open_head_files(paths, record, TOKEN)
    again.begin(1, ask(2))
    assert take(again)[0][1]["answer"] == {"volumes": ["v"]}
    again.close()
    paths.metadata.unlink()
    with pytest.raises(InputError, match="no such file"):
        open_head_files(paths, record, TOKEN)


@pytest.mark.parametrize("epoch", [1, 2, 1 << 20])
def test_only_the_first_store_of_a_cluster_knows_all_files(tmp_path: Path, epoch: int) -> None:
    """A later one was made since one was lost, and nodes that come may hold files of that."""
    paths = Paths(tmp_path)
    record = change_head(paths, epoch=epoch)
    open_head_files(paths, record, TOKEN).close()
    with contextlib.closing(open_store(paths.metadata, record.cluster)) as store:
        make_origin(store)
        origin = read_state(store).origin
    assert origin is not None and origin.is_whole == (epoch == 1)
