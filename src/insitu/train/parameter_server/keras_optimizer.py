"""A Keras optimizer that updates pieces of variables in NumPy arrays, as a server holds them.

Each piece has an optimizer of its own, made from the same configuration. So each state of an optimizer
(moments, averages, a product of momenta) belongs to one piece, and is mirrored and saved with it. One
compiled function updates all pieces. The results have the bits of the same optimizer on a replica.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
from keras.src.optimizers.base_optimizer import clip_by_global_norm
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.exchange import aligned_empty
from insitu.train.backends import active_backend
from insitu.train.replica import to_numpy

Arrays = list[NDArray[Any]]


def serialize_optimizer(optimizer: Any) -> str:
    """Return the optimizer's configuration as JSON text, from which a server makes the same optimizer.

    Raises TrainingError if the configuration holds what JSON can't.
    """
    try:
        return json.dumps(_with_public_names(keras.saving.serialize_keras_object(optimizer)))
    except (TypeError, ValueError) as error:
        raise TrainingError(
            "An optimizer on parameter servers is sent as its configuration (get_config), which must be "
            f"plain values. Received: {type(optimizer).__name__}, which gives none such ({error})."
        ) from error


def public_class(optimizer: Any) -> type:
    """Return the optimizer's class. On PyTorch, Keras makes an optimizer of a class of its own, derived from
    the public one: then that."""
    kind = type(optimizer)
    if not kind.__module__.startswith("keras.src."):
        return kind
    return next((base for base in kind.__mro__ if getattr(keras.optimizers, base.__name__, 0) is base), kind)


def _with_public_names(config: Any) -> Any:
    """Return a configuration in which Keras' own optimizers and schedules have the names that all backends
    know them by."""
    if isinstance(config, list | tuple):
        return [_with_public_names(value) for value in config]
    if not isinstance(config, dict):
        return config
    named = {key: _with_public_names(value) for key, value in config.items()}
    if str(config.get("module")).startswith("keras.src."):
        for module, public in _KERAS_MODULES.items():
            if hasattr(public, str(config.get("class_name"))):
                return {**named, "module": module, "registered_name": None}
    return named


def make_optimizer(text: str) -> Any:
    """Return the optimizer that `serialize_optimizer` described. Raises TrainingError for an unknown
    class."""
    config = json.loads(text)
    error: Exception | None = None
    try:
        _refuse_other_classes(config)
        made = keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError, ImportError, AttributeError, RecursionError) as raised:
        made, error = None, raised
    if not isinstance(made, keras.optimizers.Optimizer):
        raise TrainingError(
            "A parameter server must know the optimizer's class, and those of its schedule. Received: "
            f"{config.get('registered_name') or config.get('class_name')}. Define it before the strategy is "
            "made and mark it with @keras.saving.register_keras_serializable()."
        ) from error
    return made


_VALUES = frozenset({"__tensor__", "__numpy__", "__bytes__"})
"""Keras' names for the classes of plain values."""
_KERAS_MODULES = {
    "keras.optimizers": keras.optimizers,
    "keras.optimizers.schedules": keras.optimizers.schedules,
}


def _refuse_other_classes(config: Any) -> None:
    """Raise TypeError for a configuration that names a class other than optimizers and schedules.

    The class of an object is looked at before it is built: to build some runs code that the configuration
    holds.
    """
    if isinstance(config, list | tuple):
        for value in config:
            _refuse_other_classes(value)
    if not isinstance(config, dict):
        return
    for value in config.values():
        _refuse_other_classes(value)
    if "class_name" not in config or config["class_name"] in _VALUES:
        return
    found = _find_class(config)
    allowed = (keras.optimizers.Optimizer, keras.optimizers.schedules.LearningRateSchedule)
    if not (isinstance(found, type) and issubclass(found, allowed)) or "compile_config" in config:
        raise TypeError(f"{config['class_name']!r} is no optimizer and no schedule")


def _find_class(config: Mapping[str, Any]) -> Any:
    """Return the class that Keras would build, without importing anything."""
    name, module = str(config["class_name"]), config.get("module")
    registered = config.get("registered_name", name)
    custom = keras.saving.get_custom_objects()
    if isinstance(registered, str) and custom.get(registered) is not None:
        return custom[registered]
    return getattr(_KERAS_MODULES.get(str(module)), name, None)


class KerasUpdater:
    """An updater of `insitu.parameters` that runs the optimizer that `text` describes.

    Args:
        text: of `serialize_optimizer`.
        jit: whether the update is compiled by XLA, as it is on a replica of the same model.
    """

    elementwise = False

    def __init__(self, text: str, *, jit: bool) -> None:
        self._text = text
        self._jit = jit
        self._optimizers: dict[str, _PieceOptimizer] = {}
        self._compiled: dict[tuple[str, ...], Update] = {}
        self.learning_rate: float | None = None
        """Overrides that of the configuration if it isn't None, as a callback does on a replica."""

    def slots(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        made = self._optimizers[name] = _PieceOptimizer(make_optimizer(self._text), shape, dtype)
        return {slot: _copy_aligned(to_numpy(v)) for slot, v in made.slots.items()}

    def row_slots(self) -> dict[str, float]:
        raise NotImplementedError("Rows of tables have updaters of their own.")

    def update_rows(
        self,
        values: NDArray[Any],
        gradients: NDArray[Any],
        slots: Mapping[str, NDArray[Any]],
        step: int,
    ) -> None:
        raise NotImplementedError("Rows of tables have updaters of their own.")

    def update(
        self,
        values: Mapping[str, NDArray[Any]],
        gradients: Mapping[str, NDArray[Any]],
        slots: Mapping[str, Mapping[str, NDArray[Any]]],
        step: int,
    ) -> None:
        names = tuple(values)
        if not names:
            return
        for name, value in values.items():
            if name not in self._optimizers:  # the slots came from a checkpoint or another server
                self.slots(name, value.shape, value.dtype)
        optimizers = [self._optimizers[name] for name in names]
        if names not in self._compiled:
            self._compiled[names] = _compile(optimizers, self._jit)
        states = [[slots[name][s] for s in o.slots] for name, o in zip(names, optimizers, strict=True)]
        rate = optimizers[0].initial_rate if self.learning_rate is None else self.learning_rate
        updated, moved = self._compiled[names](
            list(values.values()), states, [gradients[name] for name in names], step, rate
        )
        for value, new in zip(values.values(), updated, strict=True):
            np.copyto(value, new)
        for state, news in zip(states, moved, strict=True):
            for array, new in zip(state, news, strict=True):
                np.copyto(array, new)

    def initialise(
        self, values: Mapping[str, NDArray[Any]], slots: Mapping[str, Mapping[str, NDArray[Any]]]
    ) -> None:
        """Fill the slots as the optimizer does when it is built for these values."""
        for name, value in values.items():
            made = _PieceOptimizer(make_optimizer(self._text), value.shape, value.dtype, value)
            for slot, variable in made.slots.items():
                np.copyto(slots[name][slot], to_numpy(variable))

    def finalize(
        self, values: Mapping[str, NDArray[Any]], slots: Mapping[str, Mapping[str, NDArray[Any]]]
    ) -> None:
        """Set values to the averages that the optimizer keeps of them, if it does."""
        for name, value in values.items():
            if name not in self._optimizers:
                self.slots(name, value.shape, value.dtype)
            average = self._optimizers[name].average
            if average is not None:
                np.copyto(value, slots[name][average])


def _copy_aligned(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy in memory that TensorFlow takes as it is."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


class _PieceOptimizer:
    """An optimizer built for one variable. `slots` are its variables without counter and learning rate."""

    def __init__(
        self, optimizer: Any, shape: Sequence[int], dtype: Any, value: NDArray[Any] | None = None
    ) -> None:
        """`value`: that of the variable when the optimizer is built; None: zeros."""
        self.optimizer = optimizer
        # The norm of all gradients together is bounded before any piece is updated.
        self.global_clipnorm, optimizer.global_clipnorm = optimizer.global_clipnorm, None
        # Slots are named after it, the same in each process: a mirror and a checkpoint find them by name.
        value = np.zeros(tuple(shape), dtype) if value is None else value
        self.variable = keras.Variable(value, dtype=np.dtype(dtype).name, name="variable")
        optimizer.build([self.variable])
        self.counter = optimizer._iterations
        rate = optimizer._learning_rate
        self.rate: Any = rate if isinstance(rate, keras.Variable) else None
        self.initial_rate = 0.0 if self.rate is None else float(to_numpy(rate))
        known = {id(self.counter), id(self.rate)}
        own = [v for v in optimizer.variables if id(v) not in known]
        # Without the number that Keras gives to those that an optimizer doesn't name, as Adafactor.
        names = [re.sub(r"_\d+$", "", v.name) for v in own]
        self.slots = {f"{index}.{name}": v for index, (name, v) in enumerate(zip(names, own, strict=True))}
        averages = optimizer._model_variables_moving_average if optimizer.use_ema else ()
        self.average = next((slot for slot, v in self.slots.items() if any(v is a for a in averages)), None)
        """The slot that holds the variable's average."""


Update = Callable[[Arrays, list[Arrays], Arrays, int, float], tuple[list[Any], list[list[Any]]]]
"""(values, slots, gradients, step, learning rate) -> (new values, new slots). Changes no argument."""


def _compile(optimizers: Sequence[_PieceOptimizer], jit: bool) -> Update:
    clip = partial(_clip_global_norm, optimizers)
    compiled: Update | None = active_backend().compile_update(optimizers, clip, jit=jit)
    return compiled or _update_eagerly(optimizers)


def _clip_global_norm(optimizers: Sequence[_PieceOptimizer], gradients: Any) -> Any:
    bound = optimizers[0].global_clipnorm
    return gradients if bound is None else clip_by_global_norm(list(gradients), bound)


def _update_eagerly(optimizers: Sequence[_PieceOptimizer]) -> Update:
    def update(values: Any, slots: Any, gradients: Any, step: int, rate: float) -> Any:
        gradients = _clip_global_norm(optimizers, [keras.ops.convert_to_tensor(g) for g in gradients])
        for made, value, own, gradient in zip(optimizers, values, slots, gradients, strict=True):
            made.variable.assign(value)
            for variable, slot in zip(made.slots.values(), own, strict=True):
                variable.assign(slot)
            made.counter.assign(step)
            if made.rate is not None:
                made.rate.assign(rate)
            made.optimizer.apply([gradient], [made.variable])
        return (
            [to_numpy(made.variable) for made in optimizers],
            [[to_numpy(v) for v in made.slots.values()] for made in optimizers],
        )

    return update
