from __future__ import annotations

import select
from pathlib import Path

import pytest

from insitu.cluster.agents import head_change
from insitu.cluster.agents.head_change import HeadChange
from insitu.cluster.agents.records import read_agent
from insitu.errors import ClusterError, InputError
from insitu.paths import Paths
from insitu.spec import NodeId

NODE = NodeId("a")
OLD = {"cluster": "c", "epoch": 3, "instance": "old"}
ORDER = {"cluster": "c", "address": "10.0.0.2:7000", "epoch": 1 << 20, "instance": "new"}


@pytest.fixture
def change(tmp_path: Path) -> HeadChange:
    Paths(tmp_path).node(NODE).mkdir(parents=True)
    found = HeadChange(Paths(tmp_path), NODE)
    found.note_joined(OLD, "10.0.0.1:7000")
    return found


def is_readable(change: HeadChange) -> bool:
    return bool(select.select([change], [], [], 0)[0])


def test_an_agent_without_a_head_obeys_another_one_and_keeps_that_on_its_disk(
    change: HeadChange, tmp_path: Path
) -> None:
    change.note_lost()
    view = change.answer("head_view", {"cluster": "c"})
    assert view.pop("without_head") >= 0 and view == {"head": "10.0.0.1:7000", "epoch": 3, "is_led": False}
    assert change.take_address("10.0.0.1:7000") == "10.0.0.1:7000" and not is_readable(change)
    change.answer("obey_head", ORDER)
    assert is_readable(change)  # the pause before the next try ends at once
    assert change.take_address("10.0.0.1:7000") == "10.0.0.2:7000" and not is_readable(change)
    record = read_agent(Paths(tmp_path), NODE)
    assert record is not None and (record.head, record.epoch, record.instance) == (
        "10.0.0.2:7000",
        1 << 20,
        "new",
    )
    # The head of before may come back while this agent is about to join it.
    with pytest.raises(ClusterError, match="has taken over from the one at"):
        change.note_joined(OLD, "10.0.0.1:7000")
    change.note_joined({"cluster": "c", "epoch": (1 << 20) + 1, "instance": "started"}, "10.0.0.2:7000")


def test_who_takes_over_without_a_person_is_obeyed_after_the_time_without_a_head_alone(
    change: HeadChange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a promise begins that time again, so that the one that has asked can begin."""
    now = 100.0
    monkeypatch.setattr(head_change.time, "monotonic", lambda: now)
    change.note_time(30.0)
    assert change.read_vacancy() == (30.0, None)
    change.note_lost()
    now = 129.0
    with pytest.raises(InputError, match=r"a must have been without a head for 30 s. Received: 29\.0 s"):
        change.answer("obey_head", {**ORDER, "after": 30.0})
    now = 131.0
    assert change.answer("head_view", {"cluster": "c"})["without_head"] == 31.0
    change.answer("obey_head", {**ORDER, "after": 30.0})
    change.answer("obey_head", {**ORDER, "after": 30.0})  # the answer was lost
    assert change.read_vacancy() == (30.0, 131.0)
    higher = {**ORDER, "epoch": 2 << 20, "instance": "other", "after": 30.0}
    with pytest.raises(InputError, match=r"Received: 0\.0 s"):
        change.answer("obey_head", higher)
    with pytest.raises(ClusterError, match="after must be a number of seconds"):
        change.answer("obey_head", {**higher, "after": "soon"})
    # The head has said another time, or that people decide, and who asks has missed that.
    now = 170.0
    change.note_time(60.0)
    with pytest.raises(InputError, match=r"without a head for 60 s. Received: 39\.0 s"):
        change.answer("obey_head", higher)
    change.note_time(None)
    with pytest.raises(InputError, match="a obeys another head where somebody says so"):
        change.answer("obey_head", higher)
    change.note_time(30.0)
    record = read_agent(Paths(tmp_path), NODE)
    assert record is not None and record.take_over_after == 30.0  # a head that begins here finds it
    change.note_joined({"cluster": "c", "epoch": (1 << 20) + 1, "instance": "started"}, "10.0.0.2:7000")
    assert change.read_vacancy() == (30.0, None)


def test_an_agent_with_a_head_obeys_no_other_one(change: HeadChange) -> None:
    assert change.answer("head_view", {"cluster": "c"})["is_led"] is True
    with pytest.raises(InputError, match=r"a is led by the head at 10\.0\.0\.1:7000, which lives"):
        change.answer("obey_head", ORDER)


def test_of_two_that_take_over_the_first_is_obeyed(change: HeadChange) -> None:
    change.note_lost()
    change.answer("obey_head", ORDER)
    change.answer("obey_head", ORDER)  # the answer was lost
    with pytest.raises(InputError, match="whose epoch 1048576 isn't lower than 1048576"):
        change.answer("obey_head", {**ORDER, "instance": "other", "address": "10.0.0.3:7000"})
    assert change.take_address("") == "10.0.0.2:7000"


@pytest.mark.parametrize(
    "order",
    [
        {**ORDER, "cluster": "d"},
        {**ORDER, "epoch": "5"},
        {**ORDER, "address": 5},
        {**ORDER, "address": "nowhere"},
        {**ORDER, "instance": None},
        {},
    ],
)
def test_what_is_no_order_of_this_cluster_is_refused(change: HeadChange, order: dict[str, object]) -> None:
    change.note_lost()
    with pytest.raises(InputError):
        change.answer("obey_head", order)
    assert change.take_address("same") == "same"
