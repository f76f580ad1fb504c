"""What updates a model on a server, made of what a worker told about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.parameters import FinalizingUpdater, Updater, make_updater
from insitu.train.parameter_server.keras_optimizer import KerasUpdater, make_optimizer
from insitu.train.parameter_server.model_spec import STATE, for_servers, number

Arrays = Mapping[str, NDArray[Any]]


def model_updater(config: Mapping[str, Any] | str) -> Updater:
    """The updater of an `updater_config`, or of what the servers know by themselves. Raises TrainingError for
    an optimizer that isn't known here."""
    if isinstance(config, str) or "state" not in config:
        return make_updater(config)
    inner: Updater
    if "built_in" in config:
        inner = make_updater(_scheduled(config))
    else:
        told = for_servers(json.loads(config["optimizer"]), norms=not config["without_norms"])
        inner = KerasUpdater(json.dumps(told), jit=bool(config["jit"]))
    return ModelUpdater(inner, adds=config["state"] == "add") if config["has_state"] else inner


def _scheduled(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(config["built_in"])
    if "optimizer" in config:
        schedule = make_optimizer(config["optimizer"])._learning_rate
        settings["learning_rate"] = lambda step: number(schedule(step))
    return settings


class ModelUpdater:
    """Leaves variables to an optimizer's updater; state that the forward pass moves isn't updated by it.

    What is pushed for state is its new value (the mean over shards), or how far a step moved it: then steps
    of workers that don't wait for each other add up, as if they had come one after the other.
    """

    elementwise = False

    def __init__(self, inner: Updater, *, adds: bool) -> None:
        self._inner = inner
        self._adds = adds

    def slots(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        if name.startswith(STATE):
            return {}
        return self._inner.slots(name, shape, dtype)

    def row_slots(self) -> dict[str, float]:
        return {}

    def update(self, values: Arrays, gradients: Arrays, slots: Mapping[str, Arrays], step: int) -> None:
        ours = [name for name in values if name.startswith(STATE)]
        for name in ours:
            if self._adds:
                np.add(values[name], gradients[name], values[name])
            else:
                np.copyto(values[name], gradients[name])
        rest = {name: value for name, value in values.items() if not name.startswith(STATE)}
        if rest:
            self._inner.update(rest, gradients, slots, step)

    def finalize(self, values: Arrays, slots: Mapping[str, Arrays]) -> None:
        if isinstance(self._inner, FinalizingUpdater):
            self._inner.finalize({n: v for n, v in values.items() if not n.startswith(STATE)}, slots)

    def update_rows(self, values: NDArray[Any], gradients: NDArray[Any], slots: Arrays, step: int) -> None:
        raise NotImplementedError("Rows of tables have updaters of their own.")
