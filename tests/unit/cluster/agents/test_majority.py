from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from agent_facts import LOAD, WALL, facts

from insitu.cluster.agents import majority
from insitu.cluster.agents.majority import ask_for_majority, check_majority
from insitu.cluster.agents.records import change_head, write_token
from insitu.cluster.decide import Member
from insitu.errors import ClusterError
from insitu.paths import Paths
from insitu.spec import NodeId


def answer_with(monkeypatch: pytest.MonkeyPatch, home: Path, *heard: float | None, left: int = 0) -> Paths:
    """Have a head answer with agents that were heard so many seconds ago; None: they have no connection."""
    paths, now = Paths(home), time.monotonic()
    write_token(paths, "t" * 32)
    change_head(paths, address="10.0.0.1:7000", take_over_after=30.0)
    members = []
    for number, ago in enumerate(heard):
        own = replace(facts(NodeId(f"n{number}")), store=f"s{number}")
        state = "lost" if ago is None else "alive"
        members.append(
            Member(own, LOAD, state, WALL, now - (ago or 0.0), None if ago is None else number, 0.0)
        )
    for number in range(left):
        own = replace(facts(NodeId(f"l{number}")), store=f"l{number}")
        members.append(Member(own, LOAD, "left", WALL, 0.0, None, 0.0))
    answer: Any = json.loads(json.dumps({"members": [asdict(member) for member in members]}))
    monkeypatch.setattr(majority, "ask_head", lambda *_, **__: answer)
    return paths


def test_the_catalogue_changes_while_most_agents_reach_its_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_majority(answer_with(monkeypatch, tmp_path, 1.0, 2.0, None))
    check_majority(answer_with(monkeypatch, tmp_path, 1.0, left=5))
    for heard in ((1.0, 16.0, 20.0), (1.0, None, None), ()):
        paths = answer_with(monkeypatch, tmp_path, *heard)
        with pytest.raises(ClusterError, match="Received: too few for 15 s"):
            check_majority(paths)
    change_head(paths, take_over_after=None)
    check_majority(paths)


def test_a_head_that_was_replaced_knows_no_majority(tmp_path: Path) -> None:
    change_head(Paths(tmp_path), successor="10.0.0.2:7000")
    assert ask_for_majority(Paths(tmp_path)) is None
