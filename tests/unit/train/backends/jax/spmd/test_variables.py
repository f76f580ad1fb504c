"""Variables hold the program's values between steps, and are sharded again only if someone assigned them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


class Variable:
    """The part of a Keras variable that is used."""

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def value(self) -> Any:
        return self._value

    def _direct_assign(self, value: Any) -> None:
        self._value = value


class Model:
    """A model of two trainable variables and one of each other group."""

    def __init__(self) -> None:
        import jax

        self.trainable_variables = [Variable(jax.numpy.full(2, float(i))) for i in range(2)]
        self.non_trainable_variables = [Variable(jax.numpy.zeros(1))]
        self.optimizer: Any = SimpleNamespace(variables=[Variable(jax.numpy.ones(1))])
        self.metrics_variables = [Variable(jax.numpy.zeros(()))]


@pytest.fixture
def mesh() -> Any:
    import jax

    from insitu.train.backends.jax.spmd.mesh_sharding import MeshSharding

    return MeshSharding.from_devices(np.array(jax.devices("cpu")[:1]), ("data",))


def of(model: Any, mesh: Any) -> Any:
    from insitu.train.backends.jax.spmd.variables import get_mesh_variables

    return get_mesh_variables(model, mesh)


def test_groups_are_those_of_keras_trainer(mesh: Any) -> None:
    from insitu.train.backends.jax.spmd.variables import GROUPS, METRICS, OPTIMIZER, OTHERS, TRAINABLE

    model = Model()
    variables = of(model, mesh)
    sizes = [len(variables.take(group)) for group in range(GROUPS)]
    assert sizes == [2, 1, 1, 1]
    assert np.asarray(variables.take(TRAINABLE)[1]).tolist() == [1, 1]
    assert np.asarray(variables.take(OPTIMIZER)[0]).tolist() == [1]
    model.optimizer = None
    assert of(model, mesh).take(OPTIMIZER) == []
    assert (OTHERS, METRICS) == (1, 3)


def test_a_value_is_placed_once_until_it_is_assigned(mesh: Any) -> None:
    import jax

    model = Model()
    variables = of(model, mesh)
    (first, _), (again, _) = variables.take(0), variables.take(0)
    assert first is again and model.trainable_variables[0].value is first
    model.trainable_variables[0]._direct_assign(jax.numpy.full(2, 7.0))
    changed, kept = variables.take(0)
    assert np.asarray(changed).tolist() == [7, 7] and changed is not first
    assert kept is variables.take(0)[1]


def test_results_of_the_program_are_the_variables_values(mesh: Any) -> None:
    model = Model()
    variables = of(model, mesh)
    results = [value + 1 for value in variables.take(0)]
    variables.put(0, results)
    assert [v.value for v in model.trainable_variables] == results
    assert [taken is result for taken, result in zip(variables.take(0), results, strict=True)] == [True, True]


def test_steps_of_one_model_share_its_variables(mesh: Any) -> None:
    model = Model()
    variables = of(model, mesh)
    assert of(model, mesh) is variables
    model.metrics_variables.append(Variable(np.zeros(())))
    assert not variables.matches(model, mesh) and of(Model(), mesh) is not variables
