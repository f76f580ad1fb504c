from __future__ import annotations

import select
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.leases import followed_head
from insitu.cluster.leases.followed_head import FollowedHead
from insitu.cluster.wire.records import read_agent

NODE = NodeId("a")
OLD = {"cluster": "c", "epoch": 3, "instance": "old"}
ORDER = {"cluster": "c", "address": "10.0.0.2:7000", "epoch": (1 << 20) + 1, "instance": "new"}


@pytest.fixture
def followed(tmp_path: Path) -> FollowedHead:
    Paths(tmp_path).node(NODE).mkdir(parents=True)
    found = FollowedHead(Paths(tmp_path), NODE)
    found.record_joined(OLD, "10.0.0.1:7000")
    return found


def is_readable(followed: FollowedHead) -> bool:
    return bool(select.select([followed], [], [], 0)[0])


@pytest.mark.parametrize("is_connected", [True, False])
def test_an_agent_follows_the_head_that_replaces_its_own_and_keeps_that_on_its_disk(
    followed: FollowedHead, tmp_path: Path, is_connected: bool
) -> None:
    if not is_connected:
        followed.record_lost()
    view = followed.answer("head_view", {"cluster": "c"})
    assert view == {"address": "10.0.0.1:7000", "epoch": 3, "instance": "old"}
    assert followed.take_address("10.0.0.1:7000") == "10.0.0.1:7000" and not is_readable(followed)
    assert followed.find_number() == 0
    followed.answer("accept_head", ORDER)
    assert followed.find_number() == 1
    assert is_readable(followed)  # the pause before the next try, or the connection, ends at once
    assert followed.take_address("10.0.0.1:7000") == "10.0.0.2:7000" and not is_readable(followed)
    record = read_agent(Paths(tmp_path), NODE)
    assert record is not None
    assert (record.head, record.epoch, record.instance) == ("10.0.0.2:7000", (1 << 20) + 1, "new")
    assert followed.describe() == {"cluster": "c", "epoch": (1 << 20) + 1, "address": "10.0.0.2:7000"}
    followed.answer("accept_head", ORDER)  # the answer was lost
    assert not is_readable(followed)
    # The head of before may come back while this agent is about to join it.
    with pytest.raises(ClusterError, match=r"The head at 10\.0\.0\.1:7000 was replaced by the one at"):
        followed.record_joined({**OLD, "epoch": 900}, "10.0.0.1:7000")
    followed.record_joined({**OLD, "epoch": (1 << 20) + 2, "instance": "again"}, "10.0.0.2:7000")


def test_the_claim_is_on_the_disk_before_the_answer(
    followed: FollowedHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(followed_head, "write_agent", fail)
    with pytest.raises(OSError, match="no room"):
        followed.answer("accept_head", ORDER)
    assert followed.take_address("10.0.0.1:7000") == "10.0.0.1:7000" and not is_readable(followed)


def test_an_agent_leaves_a_head_that_lives_for_a_higher_number_alone(followed: FollowedHead) -> None:
    """A copy of the head's home begins in a higher epoch. An agent whose head has gone follows that, too."""
    later = {**ORDER, "epoch": 4}
    with pytest.raises(InputError, match=r"a follows the head at 10\.0\.0\.1:7000, in epoch 3"):
        followed.answer("accept_head", later)
    followed.record_lost()
    followed.answer("accept_head", later)
    assert followed.take_address("") == "10.0.0.2:7000"


def test_of_two_with_one_number_the_first_is_followed(followed: FollowedHead) -> None:
    followed.answer("accept_head", ORDER)
    with pytest.raises(InputError, match=r"a follows the head at 10\.0\.0\.2:7000, in epoch 1048577"):
        followed.answer("accept_head", {**ORDER, "instance": "other", "address": "10.0.0.3:7000"})
    assert followed.take_address("") == "10.0.0.2:7000"


def test_an_agent_that_was_started_with_a_former_head_goes_back_to_the_accepted_one(
    followed: FollowedHead, tmp_path: Path
) -> None:
    followed.answer("accept_head", ORDER)
    again = FollowedHead(Paths(tmp_path), NODE)
    assert again.take_address("10.0.0.1:7000") == "10.0.0.1:7000"
    assert again.go_back("10.0.0.1:7000") and again.take_address("10.0.0.1:7000") == "10.0.0.2:7000"
    assert not again.go_back("10.0.0.2:7000")


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
def test_what_is_no_order_of_this_cluster_is_refused(
    followed: FollowedHead, order: dict[str, object]
) -> None:
    followed.record_lost()
    with pytest.raises(InputError):
        followed.answer("accept_head", order)
    assert followed.take_address("same") == "same"
