from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from agent_facts import LOAD, VERSIONS, WALL, facts

from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.decide import Member, Membership, membership
from insitu.cluster.nodes.re_replication import CopyUpkeep
from insitu.cluster.wire.options import choose_copy_rate

A, B = NodeId("a"), NodeId("b")
RESTORE = """
import json, pathlib, sys
home = pathlib.Path(sys.argv[1])
given = json.load(sys.stdin)
with open(home / "asked", "a") as file:
    file.write(json.dumps(given) + "\\n")
print((home / "answer").read_text())
"""
LEAVING = Membership(
    VERSIONS,
    {
        A: Member(facts(A), LOAD, "alive", WALL, 0.0, 1, 0.0),
        B: Member(facts(B), LOAD, "alive", WALL, 0.0, 2, 0.0, leave_by=WALL + 60),
    },
)


@pytest.fixture
def upkeep(tmp_path: Path) -> Iterator[CopyUpkeep]:
    with closing(CopyUpkeep(Paths(tmp_path), (sys.executable, "-c", RESTORE))) as found:
        yield found


def run(upkeep: CopyUpkeep, members: Membership, now: float) -> list[membership.Checked]:
    """Advance until the process that this starts has ended, without letting the time pass."""
    upkeep.advance(members, None, now)
    deadline = time.monotonic() + 60
    while upkeep.is_busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        if found := upkeep.advance(members, None, now):
            return found
    return []


def test_a_node_that_leaves_is_looked_at_until_it_is_empty(upkeep: CopyUpkeep, tmp_path: Path) -> None:
    answer = {"moved": 10, "failed": [], "left": {"b": [0, 1]}}
    (tmp_path / "answer").write_text(json.dumps(answer))
    assert run(upkeep, LEAVING, 0.0) == [membership.Checked(B, False)]
    assert run(upkeep, LEAVING, 0.0) == [], "it waits a moment before it looks again"
    (tmp_path / "answer").write_text(json.dumps({**answer, "left": {"b": [0, 0]}}))
    assert run(upkeep, LEAVING, 100.0) == [membership.Checked(B, True)]
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked == [{"leaving": ["b"], "waiting": [], "rate": None}] * 2
    empty = replace(LEAVING.members[B], is_empty=True)
    done = replace(LEAVING, members={**LEAVING.members, B: empty})
    assert run(upkeep, done, 200.0) == [] and len((tmp_path / "asked").read_text().splitlines()) == 2
    upkeep.record_change()
    assert run(upkeep, done, 200.0) == [membership.Checked(B, True)]


def test_a_lost_node_that_is_to_leave_is_looked_at_once_for_each_change(
    upkeep: CopyUpkeep, tmp_path: Path
) -> None:
    lost = Member(facts(B), LOAD, "lost", WALL, 0.0, None, 0.0, leave_by=WALL + 60)
    members = replace(LEAVING, members={**LEAVING.members, B: lost})
    (tmp_path / "answer").write_text(json.dumps({"moved": 0, "failed": [], "left": {"b": [2, 0]}}))
    assert run(upkeep, members, 0.0) == [membership.Checked(B, False)]
    assert run(upkeep, members, 1000.0) == [], "nothing has changed"
    upkeep.record_change()
    # Its tasks have died with it, whatever the journals say.
    (tmp_path / "answer").write_text(json.dumps({"moved": 9, "failed": [], "left": {"b": [0, 1]}}))
    assert run(upkeep, members, 2000.0) == [membership.Checked(B, True)]
    asked = json.loads((tmp_path / "asked").read_text().splitlines()[-1])
    assert asked == {"leaving": ["b"], "waiting": [], "rate": choose_copy_rate([facts(A).cores])}


def test_what_fails_is_tried_again_later(
    upkeep: CopyUpkeep, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for answer in ("nonsense", json.dumps({"error": "no head answers"})):
        (tmp_path / "answer").write_text(answer)
        assert run(upkeep, LEAVING, 1000.0 * len(caplog.records)) == []
    assert "ended with exit code 0" in caplog.text and "no head answers" in caplog.text


def test_nothing_is_started_where_nothing_is_to_be_done(upkeep: CopyUpkeep, tmp_path: Path) -> None:
    stays = replace(LEAVING, members={A: LEAVING.members[A]})
    assert run(upkeep, stays, 0.0) == [] and not (tmp_path / "asked").exists()


def test_a_node_that_leaves_well_in_the_middle_is_no_failure(
    upkeep: CopyUpkeep, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "answer").write_text(json.dumps({"error": "b can't be asked: Connection refused"}))
    left = Member(facts(B), LOAD, "left", WALL, 0.0, None, 0.0, leave_by=WALL + 60, is_empty=True)
    gone = replace(LEAVING, members={**LEAVING.members, B: left})
    upkeep.advance(LEAVING, None, 0.0)
    deadline = time.monotonic() + 60
    while upkeep.is_busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        assert upkeep.advance(gone, None, 0.0) == []
    assert caplog.text == ""
    # What it held, if anything, is looked after when the grace has passed.
    later = 1000.0
    upkeep.advance(gone, 60.0, later)
    assert upkeep.is_busy
