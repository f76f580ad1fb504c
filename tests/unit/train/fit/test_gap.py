"""What callbacks change can be told as it was, and be undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gap_checks
import pytest
from backend_checks import result_of, start
from gap_checks import CHECKS, make, opened, read, same

from insitu.train.fit.gap import Gap
from insitu.train.replica import read_state

tf = pytest.importorskip("tensorflow")

SCRIPT = Path(gap_checks.__file__)


@pytest.mark.parametrize("name", CHECKS)
def test_on_tensorflow(name: str) -> None:
    CHECKS[name]()


@pytest.mark.long
def test_on_jax(tmp_path: Path) -> None:
    assert result_of(start("jax", tmp_path, script=SCRIPT)) == ["jax", *CHECKS]


@pytest.mark.torch
def test_on_torch(tmp_path: Path) -> None:
    assert result_of(start("torch", tmp_path, script=SCRIPT)) == ["torch", *CHECKS]


def _slices(value: float) -> Any:
    return tf.IndexedSlices(tf.fill((1, 3), value), tf.constant([1]))


RAW: dict[str, Callable[[Any], Any]] = {
    "assign": lambda v: v.assign(tf.zeros_like(v)),
    "assign_add": lambda v: v.assign_add(tf.ones_like(v)),
    "assign_sub": lambda v: v.assign_sub(tf.ones_like(v)),
    "scatter_add": lambda v: v.scatter_add(_slices(2.0)),
    "scatter_sub": lambda v: v.scatter_sub(_slices(2.0)),
    "scatter_update": lambda v: v.scatter_update(_slices(9.0)),
    "scatter_max": lambda v: v.scatter_max(_slices(9.0)),
    "scatter_min": lambda v: v.scatter_min(_slices(-9.0)),
    "scatter_mul": lambda v: v.scatter_mul(_slices(9.0)),
    "scatter_div": lambda v: v.scatter_div(_slices(9.0)),
    "scatter_nd_add": lambda v: v.scatter_nd_add([[1]], tf.ones((1, 3))),
    "scatter_nd_sub": lambda v: v.scatter_nd_sub([[1]], tf.ones((1, 3))),
    "scatter_nd_update": lambda v: v.scatter_nd_update([[1]], tf.ones((1, 3))),
    "batch_scatter_update": lambda v: v.batch_scatter_update(
        tf.IndexedSlices(tf.fill((2, 1), 9.0), tf.constant([[1], [1]]))
    ),
    "a slice": lambda v: v[0].assign(tf.ones(3) * 9),
}


@pytest.mark.parametrize("name", RAW)
def test_a_variable_of_tensorflow_is_told_as_it_was(name: str) -> None:
    model = make()
    before = read(model)
    with opened(model) as gap:
        RAW[name](model.weights[0]._value)
        assert not same(read(model), before)
        assert same(gap.views(read_state(model)), before)


def test_what_fails_is_undone_too() -> None:
    model, gap = make(), Gap(make())
    before = read(model)
    with pytest.raises(ZeroDivisionError), gap.reverting():
        gap_checks.set_weights(model)
        raise ZeroDivisionError
    assert same(read(model), before)
