"""The roster is replaced whole, and who watches it sees each new one once."""

from __future__ import annotations

from pathlib import Path

from insitu.roster import Member, Roster, RosterWatch, read_roster, write_roster
from insitu.spec import TaskId

W0, W2, PS = TaskId("worker", 0), TaskId("worker", 2), TaskId("ps", 0)
ROSTER = Roster(3, (Member(W0, 1, "h:1", (0, 2)), Member(W2, 4, "h:2", (1,))), (Member(PS, 1, "h:3"),))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    assert read_roster(path) is None
    write_roster(path, ROSTER)
    assert read_roster(path) == ROSTER
    assert [p.name for p in tmp_path.iterdir()] == ["roster.json"]


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
    write_roster(tmp_path / "roster.json", Roster(4, ROSTER.members))
    assert watch.newest() == Roster(4, ROSTER.members)
