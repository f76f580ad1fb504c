"""The roster is replaced whole, and who watches it sees each new one once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from insitu.base.roster import Member, Roster, RosterWatch, read_roster, write_roster
from insitu.base.spec import TaskId

W0, W2, PS = TaskId("worker", 0), TaskId("worker", 2), TaskId("ps", 0)
ROSTER = Roster(3, (Member(W0, 1, "h:1", (0, 2)), Member(W2, 4, "h:2", (1,))), (Member(PS, 1, "h:3"),))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    assert read_roster(path) is None
    write_roster(path, ROSTER)
    assert read_roster(path) == ROSTER
    assert [p.name for p in tmp_path.iterdir()] == ["roster.json"]


def test_rosters_without_the_end_of_training_are_read(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    over = Roster(4, (), training_over=True)
    write_roster(path, over)
    assert read_roster(path) == over
    data = json.loads(path.read_text())
    del data["training_over"]
    path.write_text(json.dumps(data))
    assert read_roster(path) == Roster(4, ())


def test_a_rank_is_a_position_and_belongs_to_one_life() -> None:
    assert (ROSTER.rank(W2), ROSTER.rank(W2, 4), ROSTER.rank(W2, 3), ROSTER.rank(PS)) == (1, 1, None, None)
    assert ROSTER.addresses == ("h:1", "h:2")


def test_a_watch_sees_each_new_roster(tmp_path: Path) -> None:
    watch = RosterWatch(tmp_path / "roster.json")
    assert watch.newest() is None
    write_roster(tmp_path / "roster.json", ROSTER)
    first = watch.newest()
    assert first == ROSTER
    assert watch.newest() is first
    write_roster(tmp_path / "roster.json", ROSTER)  # as for a task that starts on the same host
    assert watch.newest() is first
    write_roster(tmp_path / "roster.json", Roster(4, ROSTER.members))
    assert watch.newest() == Roster(4, ROSTER.members)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"generation": "x"}', '{"generation": 1, "members": [{}], "others": []}', "7"],
)
def test_a_damaged_roster_counts_as_none(tmp_path: Path, text: str) -> None:
    """As a power cut may leave it, on a file system that doesn't keep the order of writes."""
    path = tmp_path / "roster.json"
    write_roster(path, ROSTER)
    watch = RosterWatch(path)
    assert watch.newest() == ROSTER
    path.write_text(text)
    assert read_roster(path) is None
    assert watch.newest() == ROSTER
    write_roster(path, Roster(4, ROSTER.members))
    assert watch.newest() == Roster(4, ROSTER.members)


def test_a_roster_is_on_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda d: (calls.append("fsync"), fsync(d)))
    monkeypatch.setattr(Path, "replace", lambda p, target: (calls.append("rename"), replace(p, target)))
    write_roster(tmp_path / "roster.json", ROSTER)
    assert calls == ["fsync", "rename", "fsync"]
