"""Several optimizers as one, and results that are put together again."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from torch_tree import use_torch_tree

from insitu.train.custom_loop.step_model import BoundCall, CombinedOptimizer, StepResult


def a_variable(value: float) -> Any:
    return keras.Variable(np.full(2, value, "float32"))


def test_each_optimizer_updates_only_its_own_variables() -> None:
    first, second, third = (a_variable(v) for v in (1.0, 2.0, 3.0))
    sgd, momentum = keras.optimizers.SGD(1.0), keras.optimizers.SGD(1.0, momentum=0.5)
    sgd.build([first, second])
    momentum.build([third])
    # The first variable belongs to an optimizer that this step uses, but isn't updated by it.
    both = CombinedOptimizer([(sgd, [second]), (momentum, [third])])
    gradients = [np.full(2, 0.5, "float32"), np.full(2, 1.0, "float32")]
    both.apply(gradients)
    assert first.numpy().tolist() == [1, 1]
    assert second.numpy().tolist() == [1.5, 1.5]
    assert third.numpy().tolist() == [2, 2]
    assert len(both.variables) == len(sgd.variables) + len(momentum.variables)


def test_a_call_and_a_result_are_put_together_again() -> None:
    def step(x: Any, *, rate: Any, name: str) -> Any:
        return {"sum": x + rate, "name": name}

    structure = keras.tree.map_structure(lambda leaf: None, ((0,), {"rate": 0, "name": 0}))
    # Keras sorts the keys of a dict: name, then rate.
    call = BoundCall(step, structure, (None, "a", None), (True, False, True), (False, True))
    result = StepResult(call([np.arange(3.0), np.array([2.0])]))
    assert result.rebuild(["tensor"]) == {"sum": "tensor", "name": "a"}
    assert result.rebuild(None) == {"sum": None, "name": "a"}
    assert np.asarray(result.tensors[0]).tolist() == [2, 3, 4]


@pytest.mark.torch
def test_dictionaries_keep_the_order_of_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's tree gives them sorted, and a step may read values by position."""
    use_torch_tree(monkeypatch)
    structure = keras.tree.map_structure(lambda leaf: None, (({"b": 0, "a": 0},), {}))
    call = BoundCall(dict.copy, structure, (None, None), (True, True), (False, False))
    received = call([np.array([1.0]), np.array([2.0])])  # in Keras' order: a, then b
    assert [(name, value.tolist()) for name, value in received.items()] == [("b", [2.0]), ("a", [1.0])]
    returned = StepResult(received).rebuild(["value of a", "value of b"])
    assert list(returned.items()) == [("b", "value of b"), ("a", "value of a")]
