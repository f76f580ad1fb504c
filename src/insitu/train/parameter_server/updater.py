"""The updater of a model on a server, made from the worker's description of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.parameters import (
    FinalizingUpdater,
    InitialisingUpdater,
    Updater,
    make_updater,
    set_learning_rate,
)
from insitu.train.parameter_server.keras_optimizer import KerasUpdater, make_optimizer
from insitu.train.parameter_server.model_spec import STATE_PREFIX, strip_worker_settings, to_float
from insitu.train.parameter_server.several_optimizers import SeveralUpdaters

Arrays = Mapping[str, NDArray[Any]]


def make_model_updater(config: Mapping[str, Any] | str) -> Updater:
    """Return the updater for an `updater_config`, or for one of the servers' own. Raises TrainingError for an
    unknown optimizer."""
    if isinstance(config, str) or "state" not in config:
        return make_updater(config)
    inner: Updater
    if "several" in config:
        members = [make_model_updater({**member, "has_state": False}) for member in config["several"]]
        inner = SeveralUpdaters(members, config["of"])
    elif "built_in" in config:
        inner = make_updater(_with_schedule(config))
    else:
        optimizer_config = strip_worker_settings(
            json.loads(config["optimizer"]), norms=not config["without_norms"]
        )
        inner = KerasUpdater(json.dumps(optimizer_config), jit=bool(config["jit"]))
    return ModelUpdater(inner, averages=config["state"] == "average") if config["has_state"] else inner


def _with_schedule(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(config["built_in"])
    if "optimizer" in config:
        schedule = make_optimizer(config["optimizer"])._learning_rate
        settings["learning_rate"] = lambda step: to_float(schedule(step))
    return settings


def _without_state(values: Arrays) -> dict[str, NDArray[Any]]:
    return {name: value for name, value in values.items() if not name.startswith(STATE_PREFIX)}


class ModelUpdater:
    """Leaves variables to an optimizer's updater, and updates the state that the forward pass moves itself.

    For state a worker pushes the new value: the mean over shards, where they wait for each other. Otherwise
    the state moves towards it, the less the more updates the worker hasn't seen. So it becomes the mean of
    the values of workers that began with the same state, as if they had done one step together. It never
    leaves the range of what workers pushed, however many they are.
    """

    elementwise = False
    staleness: int | None
    """Updates since the values that the worker began with. Written before each update, unless it is None:
    then workers wait for each other."""

    def __init__(self, inner: Updater, *, averages: bool) -> None:
        self._inner = inner
        self.staleness = 0 if averages else None

    @property
    def learning_rate(self) -> Any:
        """The optimizer's own, or what was set in its place."""
        inner: Any = self._inner
        return inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        set_learning_rate(self._inner, rate)

    def slots(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        if name.startswith(STATE_PREFIX):
            return {}
        return self._inner.slots(name, shape, dtype)

    def row_slots(self) -> dict[str, float]:
        return {}

    def update(self, values: Arrays, gradients: Arrays, slots: Mapping[str, Arrays], step: int) -> None:
        ours = [name for name in values if name.startswith(STATE_PREFIX)]
        for name in ours:
            if self.staleness:
                values[name] += (gradients[name] - values[name]) / values[name].dtype.type(self.staleness + 1)
            else:
                np.copyto(values[name], gradients[name])
        rest = _without_state(values)
        if rest:
            self._inner.update(rest, gradients, slots, step)

    def initialise(self, values: Arrays, slots: Mapping[str, Arrays]) -> None:
        if isinstance(self._inner, InitialisingUpdater):
            self._inner.initialise(_without_state(values), slots)

    def finalize(self, values: Arrays, slots: Mapping[str, Arrays]) -> None:
        if isinstance(self._inner, FinalizingUpdater):
            self._inner.finalize(_without_state(values), slots)

    def update_rows(self, values: NDArray[Any], gradients: NDArray[Any], slots: Arrays, step: int) -> None:
        raise NotImplementedError("Rows of tables have updaters of their own.")
