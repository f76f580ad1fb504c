"""`keras.distribution` is off for a while, whatever happens meanwhile."""

from __future__ import annotations

import keras
import pytest

from insitu.train.backends.jax.spmd.program import without_distribution


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The distribution that is set, the last one of this list."""
    values: list[object] = ["data parallel"]
    monkeypatch.setattr(keras.distribution, "distribution", lambda: values[-1])
    monkeypatch.setattr(keras.distribution, "set_distribution", values.append)
    return values


def test_it_is_off_inside_and_back_behind(held: list[object]) -> None:
    with without_distribution():
        assert keras.distribution.distribution() is None
    assert held[-1] == "data parallel"


def test_it_is_back_after_an_error(held: list[object]) -> None:
    with pytest.raises(KeyError), without_distribution():
        raise KeyError
    assert held[-1] == "data parallel"


def test_it_is_a_decorator_too(held: list[object]) -> None:
    assert without_distribution()(keras.distribution.distribution)() is None
    assert held[-1] == "data parallel"
