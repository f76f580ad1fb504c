"""How the key of the head is won, kept and lost, in an embedded store whose clock the test moves."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_hosts import wait_until

from insitu.base.errors import ClusterError, HeadReplaced, StoreUnavailable
from insitu.cluster.decide import EPOCHS_OF_A_NUMBER, HEAD_LEASE_SECONDS, find_cluster_number
from insitu.cluster.leases import leading
from insitu.cluster.leases.leading import Lead, Won, parse_won, win
from insitu.metadata import HEAD_KEY, Delete, Put, read_leader
from insitu.metadata.embedded import EmbeddedStore


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[EmbeddedStore]:
    made = EmbeddedStore(tmp_path / "x.sqlite", "c", create=True, clock=clock)
    yield made
    made.close()


@pytest.fixture
def lead(
    store: EmbeddedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Won], Lead]]:
    """Makes leads whose time is that of the store, and which keep their leases often."""
    monkeypatch.setattr(leading, "read_clock", clock)
    monkeypatch.setattr(leading, "KEEP_SECONDS", 0.01)
    monkeypatch.setattr(leading, "_RETRY_SECONDS", 0.01)
    made = []

    def make(won: Won) -> Lead:
        made.append(Lead(store, won))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_one_wins_and_each_number_is_higher(store: EmbeddedStore, clock: Clock) -> None:
    first = win(store, 7)
    assert find_cluster_number(first.epoch) == 1 and parse_won(first.encode()) == first
    assert parse_won("") is None
    with pytest.raises(ClusterError, match="another one, just being started"):
        win(store, 7)
    # What this home has left, which has ended, doesn't count.
    again = win(store, 7, own=first.instance)
    assert again.epoch == 2 * EPOCHS_OF_A_NUMBER
    clock.now += HEAD_LEASE_SECONDS
    assert win(store, 7).epoch == 3 * EPOCHS_OF_A_NUMBER
    clock.now += HEAD_LEASE_SECONDS
    # Nodes have seen more than an etcd that was restored.
    assert win(store, 9 * EPOCHS_OF_A_NUMBER + 3).epoch == 10 * EPOCHS_OF_A_NUMBER


def test_of_two_that_try_at_once_one_wins(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    grant = store.grant

    def grant_late(seconds: float) -> int:
        monkeypatch.setattr(store, "grant", grant)
        win(store, 0)  # another one, in between
        return grant(seconds)

    monkeypatch.setattr(store, "grant", grant_late)
    with pytest.raises(ClusterError, match="A cluster has one head"):
        win(store, 0)


def test_a_head_says_where_it_is_and_the_one_before_changes_nothing(
    store: EmbeddedStore, clock: Clock, lead: Callable[[Won], Lead]
) -> None:
    first = lead(win(store, 0))
    first.announce("h:1")
    old = first.make_store()
    old.transact([], [Put("a", b"1")], secrets.token_hex(16))
    first.close()  # as if it were suspended
    clock.now += HEAD_LEASE_SECONDS
    second = lead(win(store, 0))
    second.announce("h:2")
    for change in (lambda: old.transact([], [Put("a", b"2")], "1" * 32), lambda: first.announce("h:1")):
        with pytest.raises(HeadReplaced, match="the one at h:2"):
            change()
    assert store.get(["a"])[0]["a"].value == b"1"
    assert not first.may_lead() and second.may_lead()


def test_a_head_keeps_its_lease_until_it_resigns(
    store: EmbeddedStore, clock: Clock, lead: Callable[[Won], Lead]
) -> None:
    held = lead(win(store, 0))
    held.announce("h:1")
    for _ in range(5):
        kept = held._hold
        clock.now += HEAD_LEASE_SECONDS - 1
        wait_until(lambda kept=kept: held._hold != kept, "the lease to be kept")
    assert held.may_lead()
    held.resign()
    assert store.get([HEAD_KEY])[0] == {}


def test_a_head_that_has_lost_its_key_says_who_leads(
    store: EmbeddedStore, clock: Clock, lead: Callable[[Won], Lead]
) -> None:
    won = win(store, 0)
    clock.now += HEAD_LEASE_SECONDS
    lead(win(store, 0)).announce("h:2")
    suspended = lead(won)
    wait_until(lambda: suspended.ended, "the end")
    assert "the one at h:2 leads: this one ends" in suspended.ended and suspended.successor == "h:2"
    suspended.resign()  # which takes nothing from the other one
    leader = read_leader(store.get([HEAD_KEY])[0][HEAD_KEY])
    assert leader is not None and leader.address == "h:2"


def test_a_key_that_somebody_removes_ends_the_head(store: EmbeddedStore, lead: Callable[[Won], Lead]) -> None:
    held = lead(win(store, 0))
    store.transact([], [Delete(HEAD_KEY)], secrets.token_hex(16))
    wait_until(lambda: held.ended, "the end")
    assert "has ended: this one ends" in held.ended


def test_a_head_whose_etcd_is_silent_changes_nothing_and_says_so(
    store: EmbeddedStore,
    clock: Clock,
    lead: Callable[[Won], Lead],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = lead(win(store, 0))
    keep = store.keep

    def be_silent(lease: int) -> bool:
        raise StoreUnavailable("nobody answers")

    monkeypatch.setattr(store, "keep", be_silent)
    assert held.may_lead()
    clock.now += HEAD_LEASE_SECONDS - 1
    assert held.may_lead()
    monkeypatch.setattr(store, "_clock", lambda: 1000.0)  # etcd gives its leases more time then
    clock.now += 1
    assert not held.may_lead()
    wait_until(lambda: "Nothing is changed until it does" in caplog.text, "the message")
    monkeypatch.setattr(store, "keep", keep)
    wait_until(held.may_lead, "its return")
    assert not held.ended
    wait_until(lambda: "etcd answers again" in caplog.text, "the message")


def test_nobody_leads_after_down_until_a_person_says_so(
    store: EmbeddedStore, lead: Callable[[Won], Lead]
) -> None:
    held = lead(win(store, 0))
    held.announce("h:1")
    held.resign(down=True)
    leader = read_leader(store.get([HEAD_KEY])[0][HEAD_KEY])
    assert leader is not None and leader.is_down
    with pytest.raises(ClusterError, match="`insitu down` has ended the cluster"):
        win(store, 0)
    assert win(store, 0, after_down=True).epoch == 2 * EPOCHS_OF_A_NUMBER


def test_the_next_head_goes_on_with_the_options_of_the_one_before(
    store: EmbeddedStore, clock: Clock, lead: Callable[[Won], Lead]
) -> None:
    first = lead(win(store, 0))
    assert first.read_options() == {}
    first.options = {"copy_lost_after": None}
    wait_until(lambda: "head/options" in store.get(["head/options"])[0], "the options")
    first.close()
    clock.now += HEAD_LEASE_SECONDS
    assert lead(win(store, 0)).read_options() == {"copy_lost_after": None}
