"""Which hosts are lost and which are only slow. Time is a number here."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from insitu.base.spec import NodeId
from insitu.cluster.decide.host_loss import (
    ROUND_TRIPS,
    SILENT_SECONDS,
    VANISHED_SECONDS,
    HostSigns,
    HostWatch,
)

A, B, C = map(NodeId, "abc")
FINE = HostSigns(0.0, 0.2)
STEP = 0.05


def watch_until_lost(
    watch: HostWatch,
    signs: Callable[[float], dict[NodeId, HostSigns]],
    seconds: float = 30.0,
    seen_at: float | None = None,
) -> tuple[float, dict[NodeId, str], list[NodeId]]:
    """Return when a host was lost first (the end of the time: never), why, and who was suspected."""
    suspected: list[NodeId] = []
    for number in range(int(seconds / STEP)):
        now = number * STEP
        if seen_at is not None and now >= seen_at:
            watch.record_seen(B)
        verdict = watch.observe(signs(now), now)
        suspected += verdict.suspected
        if verdict.lost:
            return now, dict(verdict.lost), suspected
    return seconds, {}, suspected


def vanish(round_trip: float = 0.0, back_at: float = 1e9) -> Callable[[float], dict[NodeId, HostSigns]]:
    """b acknowledges nothing from the beginning until `back_at`."""

    def signs(now: float) -> dict[NodeId, HostSigns]:
        gone = HostSigns(now if now < back_at else 0.0, now if now < back_at else 0.0, round_trip)
        return {A: FINE, B: gone, C: FINE}

    return signs


def test_a_host_that_vanishes_is_lost_after_the_limit_and_suspected_once() -> None:
    when, lost, suspected = watch_until_lost(HostWatch(), vanish())
    assert VANISHED_SECONDS <= when <= VANISHED_SECONDS + 3 * STEP
    assert lost == {B: "acknowledged nothing for 1.5 s, and no other host reaches it"} and suspected == [B]


def test_one_looks_again_when_a_host_can_be_suspected() -> None:
    watch = HostWatch()
    watch.observe({A: FINE, B: HostSigns(0.1, 0.0)}, 0.0)
    assert watch.next_look == pytest.approx(VANISHED_SECONDS / 3 - 0.1)


@pytest.mark.parametrize("away", [0.3, 1.0])
def test_a_link_that_is_away_for_a_moment_is_no_loss(away: float) -> None:
    assert watch_until_lost(HostWatch(), vanish(back_at=away))[1] == {}


def test_the_limit_follows_the_round_trip() -> None:
    when, lost, _ = watch_until_lost(HostWatch(), vanish(round_trip=0.2))
    assert B in lost and ROUND_TRIPS * 0.2 <= when <= ROUND_TRIPS * 0.2 + 3 * STEP


def test_a_host_that_another_one_reaches_is_lost_only_when_its_server_is_silent() -> None:
    when, lost, _ = watch_until_lost(HostWatch(), vanish(), seen_at=0.7)
    assert lost == {B: "said nothing for 10 s"} and when > SILENT_SECONDS


def test_a_server_that_hangs_on_a_host_that_acknowledges_is_given_its_time() -> None:
    when, lost, suspected = watch_until_lost(
        HostWatch(), lambda now: {A: FINE, B: HostSigns(0.0, now), C: FINE}
    )
    assert list(lost) == [B] and when > SILENT_SECONDS and suspected == []


@pytest.mark.parametrize("quiet", [(A, B, C), (A, B)])
def test_where_most_hosts_are_quiet_this_machine_is_cut_off(quiet: tuple[NodeId, ...]) -> None:
    def signs(now: float) -> dict[NodeId, HostSigns]:
        return {node: HostSigns(now, 0.0) if node in quiet else FINE for node in (A, B, C)}

    assert watch_until_lost(HostWatch(), signs)[1] == {}


def test_of_two_hosts_one_can_be_lost_and_a_single_one_has_its_time() -> None:
    of_two = watch_until_lost(HostWatch(), lambda now: {A: FINE, B: HostSigns(now, now)})
    assert list(of_two[1]) == [B] and of_two[0] < 2 * VANISHED_SECONDS
    alone = watch_until_lost(HostWatch(), lambda now: {B: HostSigns(now, now)})
    assert list(alone[1]) == [B] and alone[0] > SILENT_SECONDS


def test_time_in_which_this_process_did_not_run_does_not_count() -> None:
    """A beat is on its way, and the last acknowledgement came before the pause."""
    watch = HostWatch()
    watch.observe({A: FINE, B: FINE}, 0.0)
    assert watch.observe({A: FINE, B: HostSigns(60.0, 1.0)}, 60.0).lost == {}
    assert watch.next_look <= STEP
    assert watch.observe({A: FINE, B: FINE}, 60.1).lost == {}
    assert watch.next_look == math.inf


@pytest.mark.parametrize("last_beat", [0.0, 0.1, 0.2])
def test_a_host_is_suspected_and_lost_on_time_if_one_looks_when_the_watch_says(last_beat: float) -> None:
    """A look comes with each beat at the latest. The host has acknowledged the last one before time 0."""
    watch, now, beat, suspected_at = HostWatch(), 0.0, 0.25, None
    while now < 10:
        verdict = watch.observe({A: FINE, B: HostSigns(now + last_beat, 0.0), C: FINE}, now)
        if verdict.suspected:
            suspected_at = now
        if verdict.lost:
            break
        now += min(beat, watch.next_look) + 0.001
    assert suspected_at is not None and suspected_at + last_beat <= VANISHED_SECONDS / 3 + STEP
    assert VANISHED_SECONDS <= now + last_beat <= VANISHED_SECONDS + 2 * STEP


def test_a_host_that_was_seen_can_be_suspected_again() -> None:
    watch = HostWatch()
    watch_until_lost(watch, vanish(back_at=1.0), seconds=2.0, seen_at=0.6)
    shifted = watch_until_lost(watch, vanish())
    assert list(shifted[1]) == [B]
