"""How many bytes a second, and how many at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.grid.transfer.rate_limit import MIN_LENGTH, RateLimit, first_length, next_length
from insitu.grid.transfer.requests import CHUNK_BYTES, MAX_LENGTH


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@given(st.lists(st.integers(1, 10_000_000), min_size=1), st.floats(1.0, 1e9))
def test_bytes_take_the_time_that_the_limit_gives_them(counts: list[int], rate: float):
    clock = FakeClock()
    limit = RateLimit(rate, clock=clock, pause=clock.pause)
    for count in counts:
        limit.take(count)
    assert clock.now == pytest.approx(sum(counts) / rate)


def test_time_without_bytes_is_not_saved_up():
    clock = FakeClock()
    limit = RateLimit(10, clock=clock, pause=clock.pause)
    clock.now = 100.0
    limit.take(50)
    assert clock.now == 105.0


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_limit_is_positive(rate: float):
    with pytest.raises(InputError, match="positive number of bytes"):
        RateLimit(rate)


def test_requests_take_about_a_quarter_of_the_time_that_they_have():
    assert next_length(CHUNK_BYTES, CHUNK_BYTES, 0.001, 10) == 4 * CHUNK_BYTES, "grows step by step"
    assert next_length(64 << 20, 64 << 20, 6.4, 10) == 26_214_400
    assert next_length(CHUNK_BYTES, 1000, 10, 10) == MIN_LENGTH
    assert next_length(MAX_LENGTH, MAX_LENGTH, 0.01, 10) == MAX_LENGTH
    assert first_length(10, None) == CHUNK_BYTES and first_length(10, RateLimit(100_000)) == 250_000
