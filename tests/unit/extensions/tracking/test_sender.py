"""The process that sends records: each once, in order, whatever the tracker does."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from insitu.base.tracking import read_sent
from insitu.extensions.tracking import sender
from insitu.extensions.tracking.sender import Sender


class Tracker:
    """A tracker that keeps what it is told. `fail` raises before a call is done, `fail_behind` after it."""

    package = install = "fake"

    def __init__(self, by_name: bool = True) -> None:
        self.link = "http://me:secret@host/run"
        self.by_name = by_name
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.calls: list[str] = []
        self.fail: Callable[[str], bool] = lambda call: False
        self.fail_behind: Callable[[str], bool] = lambda call: False

    def open(self, spec: Any) -> Tracker:
        self._note("open", lambda: None)
        return self

    def read_last_steps(self) -> dict[str, int]:
        if self.by_name:
            return {name: step for step, values in self.metrics for name in values}
        return {"": max(step for step, _ in self.metrics)} if self.metrics else {}

    def _note(self, call: str, do: Callable[[], None]) -> None:
        if self.fail(call):
            raise ConnectionError("no answer")
        self.calls.append(call)
        do()
        if self.fail_behind(call):
            raise ConnectionError("the answer was lost")

    def log_parameters(self, values: Any) -> None:
        self._note("parameters", lambda: None)

    def log_metrics(self, step: int, values: Any, at: float) -> None:
        self._note(f"metrics {step}", lambda: self.metrics.append((step, dict(values))))

    def log_file(self, path: Path) -> None:
        self._note(f"file {path.name}", lambda: None)

    def flush(self) -> None:
        self._note("flush", lambda: None)

    def end(self, status: str) -> None:
        self._note(f"end {status}", lambda: None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run = {"tracker": "fake", "address": "", "experiment": "x", "name": "job-1"}
    (tmp_path / "run.json").write_text(json.dumps(run))
    monkeypatch.setattr(sender, "_LOOK_SECONDS", 0.0)
    return tmp_path


def write(folder: Path, *records: dict[str, Any]) -> None:
    with (folder / "outbox.jsonl").open("ab") as file:
        file.writelines(json.dumps(each).encode() + b"\n" for each in records)


def metrics(step: int, **values: float) -> dict[str, Any]:
    return {"kind": "metrics", "step": step, "at": 1.0, "values": values or {"loss": float(step)}}


def send(
    folder: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch, once: bool = False
) -> tuple[bool, str]:
    """Send all; return whether it was sent, and what was said."""
    monkeypatch.setattr(sender, "find_tracker", lambda name: tracker)
    said = io.StringIO()
    each = Sender(folder, said, once)
    each._closed = True  # the script has ended
    return each.send_all(), said.getvalue()


END = {"kind": "end", "status": "finished"}


def test_records_are_sent_in_their_order_and_then_never_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.keras").touch()
    files = [{"kind": "file", "path": str(folder / name)} for name in ("model.keras", "gone.keras")]
    write(folder, {"kind": "parameters", "values": {"a": 1}}, metrics(0), metrics(1), *files, END)
    tracker = Tracker()
    done, said = send(folder, tracker, monkeypatch)
    expected = ["open", "parameters", "metrics 0", "metrics 1", "file model.keras", "end finished"]
    assert done and tracker.calls == expected
    assert said == "insitu: run job-1 is tracked by fake http://***@host/run\n"
    assert json.loads((folder / "status.json").read_text()) == {"link": "http://***@host/run", "problem": ""}
    assert read_sent(folder) == (folder / "outbox.jsonl").stat().st_size
    assert send(folder, tracker, monkeypatch) == (True, "") and tracker.calls == expected


@pytest.mark.parametrize("by_name", [True, False])
def test_a_record_whose_answer_was_lost_is_not_sent_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    write(folder, metrics(0), metrics(1), metrics(2), END)
    tracker = Tracker(by_name)
    lost = iter([True])
    tracker.fail_behind = lambda call: call == "metrics 1" and next(lost, False)
    assert send(folder, tracker, monkeypatch)[0]
    assert [step for step, _ in tracker.metrics] == [0, 1, 2]


@pytest.mark.parametrize("by_name", [True, False])
def test_two_records_of_one_step_are_both_sent_by_two_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    tracker = Tracker(by_name)
    write(folder, metrics(19, batch=1.0))
    assert send(folder, tracker, monkeypatch)[0]
    write(folder, metrics(19, loss=2.0))
    assert send(folder, tracker, monkeypatch)[0]
    assert tracker.metrics == [(19, {"batch": 1.0}), (19, {"loss": 2.0})]


def test_an_outage_is_said_once_and_all_is_sent_behind_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, metrics(0), metrics(1), END)
    tracker = Tracker()
    left = iter(range(5))
    tracker.fail = lambda call: call == "open" and next(left, None) is not None
    done, said = send(folder, tracker, monkeypatch)
    assert done and [step for step, _ in tracker.metrics] == [0, 1]
    assert said.count("isn't reachable (ConnectionError: no answer)") == 1
    assert said.count("it is reachable again") == 1


def test_one_try_is_enough_to_know_that_nobody_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, metrics(0))
    tracker = Tracker()
    tracker.fail = lambda call: True
    assert not send(folder, tracker, monkeypatch, once=True)[0]
    assert read_sent(folder) == 0
    assert "ConnectionError" in json.loads((folder / "status.json").read_text())["problem"]


def test_a_file_that_is_refused_does_not_hold_up_what_is_behind_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.keras").touch()
    write(folder, metrics(0), {"kind": "file", "path": str(folder / "model.keras")}, metrics(1), END)
    tracker = Tracker()
    tracker.fail = lambda call: call.startswith("file")
    done, said = send(folder, tracker, monkeypatch)
    assert done and [step for step, _ in tracker.metrics] == [0, 1]
    assert "model.keras is left out: ConnectionError" in said


def test_a_line_that_is_being_written_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, metrics(0))
    with (folder / "outbox.jsonl").open("ab") as file:
        file.write(b'{"kind": "met')
    tracker = Tracker()
    assert send(folder, tracker, monkeypatch)[0]
    assert [step for step, _ in tracker.metrics] == [0]
