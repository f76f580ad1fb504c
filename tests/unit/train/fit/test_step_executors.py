"""Executors of a model's steps: made once for each structure of batches, and anew with the model."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.errors import TrainingError
from insitu.train.fit.step_executors import StepExecutors
from insitu.train.replica.building import build_to_predict


class Making:
    """A strategy that notes what it makes."""

    def __init__(self) -> None:
        self.firsts: list[bool] = []
        sampler = SimpleNamespace(hold=lambda activity: contextlib.nullcontext())
        self.membership = SimpleNamespace(num_shards=2, reporter=SimpleNamespace(sampler=sampler))

    def placement(self) -> Any:
        return contextlib.nullcontext()

    def check_recompile(self, model: Any) -> None:
        """Nothing."""

    def before_build(self, model: Any, example: Any, part_rows: int | None) -> None:
        """Nothing."""

    def make_step(self, model: Any, example: Any, *, first: bool) -> Any:
        assert model.built
        self.firsts.append(first)
        return object()


@pytest.fixture
def model() -> Any:
    made = keras.Sequential([keras.layers.Dense(1), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(), "mse")
    return made


def batch(columns: int = 2, rows: int = 1, dtype: str = "float32") -> Any:
    return np.zeros((rows, columns), dtype), np.zeros((rows, 1), dtype)


def test_one_for_each_structure_of_batches(model: Any) -> None:
    strategy = Making()
    executors = StepExecutors(model, strategy)  # type: ignore[arg-type]
    first = executors.prepare(batch(), None)
    assert executors.prepare(batch(rows=3), None) is first
    assert executors.prepare(batch(dtype="float64"), None) is not first
    assert executors.prepare(batch(), None, build_to_predict) is not first
    assert (len(executors.made), strategy.firsts) == (3, [True, False, False])


def test_all_are_made_anew_once_they_are_forgotten(model: Any) -> None:
    strategy = Making()
    executors = StepExecutors(model, strategy)  # type: ignore[arg-type]
    before = executors.prepare(batch(), None)
    executors.forget()
    assert executors.made == ()
    assert executors.prepare(batch(), None) is not before
    assert strategy.firsts == [True, True]


@pytest.mark.parametrize(("backend", "kept"), [("tensorflow", True), ("jax", False), ("torch", False)])
@pytest.mark.parametrize("what", ["optimizer", "trainable"])
def test_a_change_without_compile_counts_where_it_does_in_keras(
    model: Any, monkeypatch: pytest.MonkeyPatch, backend: str, kept: bool, what: str
) -> None:
    executors = StepExecutors(model, Making())  # type: ignore[arg-type]
    before = executors.prepare(batch(), None)
    if what == "optimizer":
        model.optimizer = keras.optimizers.Adam()
    else:
        model.layers[0].trainable = False
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    assert (executors.prepare(batch(), None) is before) == kept


def test_a_failure_to_build_ends_the_building(model: Any) -> None:
    executors = StepExecutors(model, Making())  # type: ignore[arg-type]

    def fail(model: Any, example: Any) -> None:
        assert not executors.builds
        raise ZeroDivisionError

    with executors.building(by_prepare=True):
        with pytest.raises(ZeroDivisionError):
            executors.prepare(batch(), None, fail)
        assert executors.builds


def test_variables_that_the_optimizer_does_not_know_are_refused_on_jax(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors = StepExecutors(model, Making())  # type: ignore[arg-type]
    executors.prepare(batch(), None)
    model.layers[0].trainable = False
    executors.check_trained()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(TrainingError, match="4 variables then, and 2 now"):
        executors.check_trained()
    model.layers[0].trainable = True
    executors.check_trained()
    model.layers[0].trainable = False
    executors.forget()
    executors.prepare(batch(), None)
    executors.check_trained()
