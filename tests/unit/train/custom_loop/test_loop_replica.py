"""A replica of a custom loop keeps the outputs of the user's step, by shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from insitu.train.custom_loop.loop_replica import CompiledGradientMixin

NOTHING = np.zeros(0)


class Base:
    """Stands for a replica of `fit`, whose compiled gradient returns one result."""

    def __init__(self, model: Any, scale: int) -> None:
        self.scale = scale
        self.results: list[Any] = []

    def _gradient(self, data: int) -> Any:
        return data * self.scale, ["output", data]

    def gradient(self, shard: int, data: Any, floats: Any, record: Any) -> None:
        self.results.append(self._gradient(data))


class Keeping(CompiledGradientMixin, Base):
    def _keep_outputs(self, *arguments: Any) -> Any:
        result, self.outputs[self._shard] = self._compiled(*arguments)
        return result


def test_outputs_are_taken_off_before_the_replica_sees_the_rest() -> None:
    replica = Keeping(SimpleNamespace(without_gradient=False), 10)
    for shard, data in ((2, 3), (0, 4)):
        replica.gradient(shard, data, NOTHING, NOTHING)
    assert replica.results == [30, 40]
    assert replica.outputs == {2: ["output", 3], 0: ["output", 4]}


def test_a_step_without_a_gradient_is_known_as_such() -> None:
    replica: Any = Keeping(SimpleNamespace(without_gradient=True), 1)
    assert replica._without_gradient and replica.outputs == {}


def test_how_outputs_are_taken_off_is_the_backends_matter() -> None:
    class Without(CompiledGradientMixin, Base):
        pass

    with pytest.raises(NotImplementedError):
        Without(SimpleNamespace(without_gradient=False), 1).gradient(0, 1, NOTHING, NOTHING)
