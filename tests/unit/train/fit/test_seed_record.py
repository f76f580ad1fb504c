"""Seeds of a worker on servers are known in the middle of an epoch, once one epoch was seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from insitu.train.fit.loop_state import SeedRecord


class Seed:
    """A seed generator's state: `[seed, counter]`."""

    def __init__(self, counter: int) -> None:
        self.value = np.array([7, counter], np.uint32)

    def assign(self, value: Any) -> None:
        self.value = np.asarray(value)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.value


def make_state(*counters: int) -> Any:
    return SimpleNamespace(seeds=tuple(Seed(counter) for counter in counters))


def test_seeds_are_where_a_step_has_left_them(monkeypatch: Any) -> None:
    monkeypatch.setattr("insitu.train.fit.loop_state.to_numpy", lambda seed: np.array(seed.value))
    state, record = make_state(0, 0), SeedRecord()
    record.record(state, 0, 0)
    state.seeds[0].value[1], state.seeds[1].value[1] = 10, 20
    at_end = record.record(state, 0, 5)
    begin = record.record(state, 1, 0)

    for found, place, expected in (
        (at_end, (0, 5), [10, 20]),
        (at_end, (1, 0), [10, 20]),
        (begin, (1, 0), [10, 20]),
        (begin, (1, 3), [16, 32]),
    ):
        other = make_state(0, 0)
        SeedRecord().restore(other, found, *place)
        assert [int(seed.value[1]) for seed in other.seeds] == expected
        assert other.seeds[0].value.dtype == np.uint32 and other.seeds[0].value[0] == 7


def test_without_seeds_there_is_nothing_to_record() -> None:
    state, record = make_state(), SeedRecord()
    SeedRecord().restore(make_state(), record.record(state, 0, 0), 3, 2)
