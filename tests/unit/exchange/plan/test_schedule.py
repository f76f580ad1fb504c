"""The schedule of a reduction: whom it exchanges bytes with, and what it leaves out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from insitu.exchange.plan.schedule import Schedule, ScheduleStep, Transfer


def test_the_peers_are_those_that_bytes_are_sent_to_in_their_order() -> None:
    data = np.zeros(2)
    schedule = Schedule({2: [Transfer(data)], 0: []}, {2: [], 0: [Transfer(data)]}, {2: 1, 0: 1})
    assert schedule.peers == [2, 0]
    assert Schedule({}, {}, {}).peers == []


def test_a_transfer_waits_for_no_step_unless_it_says_so() -> None:
    data = np.zeros(2)
    assert Transfer(data).gate == 0
    step = ScheduleStep([data, data], data, {1: 2})
    schedule = Schedule({1: [Transfer(data, gate=1)]}, {1: []}, {1: 1}, [step])
    assert not schedule.in_place and not schedule.delay_header and schedule.copy_at_end is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.in_place = True  # type: ignore[misc]
