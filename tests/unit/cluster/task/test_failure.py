"""A task's account of its own end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from insitu.base.errors import PeerLost, StorageFull, UnknownCache
from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.cluster.task.failure import compute_fingerprint, describe_failure, read_failure, write_failure


def fails(message: str) -> None:
    raise ValueError(message)


def fails_otherwise(message: str) -> None:
    raise ValueError(message)


def loses_a_peer(_: str) -> None:
    try:
        raise PeerLost("gone", rank=1, task="worker:1", operation="sum", sequence=0, last_completed=-1)
    except PeerLost as error:
        raise RuntimeError("a callback failed") from error


def caught(call: Callable[[str], None], message: str = "m") -> BaseException:
    try:
        call(message)
    except Exception as error:
        return error
    raise AssertionError


def test_equal_tracebacks_have_equal_fingerprints_whatever_they_say() -> None:
    errors = [caught(fails, f"at {address}") for address in range(2)]
    assert compute_fingerprint(errors[0]) == compute_fingerprint(errors[1])
    assert compute_fingerprint(caught(fails)) != compute_fingerprint(caught(fails_otherwise))


def test_an_exit_that_the_script_chose_is_known_by_its_place_and_code() -> None:
    def leaves(code: object) -> BaseException:
        try:
            sys.exit(code)  # type: ignore[arg-type]
        except SystemExit as error:
            return error

    assert compute_fingerprint(leaves(3)) == compute_fingerprint(leaves(3)) != compute_fingerprint(leaves(4))
    assert (describe_failure(leaves(3)).type, describe_failure(leaves(3)).message) == ("SystemExit", "")
    assert describe_failure(leaves("no data")).message == "no data"


def test_a_lost_peer_is_known_however_it_is_wrapped() -> None:
    assert describe_failure(caught(loses_a_peer)).peer_lost
    assert not describe_failure(caught(fails)).peer_lost


def chained(error: Exception, origin: Exception) -> Exception:
    error.__cause__ = origin
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UnknownCache("no"), True),
        (AttributeError("no"), True),
        (ModuleNotFoundError("no"), True),
        (chained(ValueError("no"), KeyError("no")), True),
        (SystemExit(2), True),
        (SystemExit(1), False),
        (RuntimeError("no"), False),
        (StorageFull("no"), False),
        (chained(ValueError("no"), ConnectionError("no")), False),
        (json.JSONDecodeError("no", "", 0), False),
    ],
)
def test_a_mistake_is_an_error_that_comes_again(error: BaseException, expected: bool) -> None:
    assert describe_failure(error).mistake is expected


def test_the_account_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Paths(tmp_path).job("j-1").failure(TaskId("worker", 1))
    path.parent.mkdir(parents=True)
    monkeypatch.setenv("INSITU_HOME", str(tmp_path))
    monkeypatch.setenv("INSITU_JOB_ID", "j-1")
    monkeypatch.setenv("INSITU_TASK", "worker:1")
    error = caught(fails, "x" * 5000)
    write_failure(error)
    found = read_failure(path)
    assert found == describe_failure(error) and len(found.message) == 2000
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"type": "x"}'])
def test_an_account_that_cannot_be_read_is_none(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "failure.json"
    if text is not None:
        path.write_text(text)
    assert read_failure(path) is None


def test_the_name_of_a_file_that_is_no_text_can_be_written_down() -> None:
    """The job's output takes UTF-8 alone: the controller, which says there why tasks end, ended by it."""
    assert describe_failure(FileNotFoundError("a\udcff")).message == "a\\udcff"
