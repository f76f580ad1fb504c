"""Pure: updates values from gradients on a server, in NumPy, in place, in blocks that stay in the cache.

`Updater` is the interface: a strategy may bring another one, such as one that runs a Keras optimizer. Those
here compute what Keras' optimizers of the same name do. References: Adam, Kingma and Ba 2015; Adagrad, Duchi
et al. 2011; FTRL-Proximal, McMahan et al. 2013.

For rows of a sparse table the update is lazy: rows without a gradient in a push don't change and their slots
don't decay, while `step` counts updates of the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import InputError
from insitu.parameters import native

Array = NDArray[Any]
Slots = Mapping[str, Array]
"""An optimizer's state of one piece, by slot."""
BLOCK = 1 << 15
"""Elements of a block, so that its value, gradient, two slots and scratch memory stay in the second-level
cache."""


class Updater(Protocol):
    """Changes values in place. All state that outlives a call is in the slots, which the server keeps."""

    @property
    def elementwise(self) -> bool:
        """True if an element's update depends on that element alone. Then `update` may get all pieces of
        one dtype as one flat array, which is faster."""

    def slots(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Array]:
        """Return new slots for a dense piece, of any shape and dtype; if elementwise, of the piece's own."""

    def row_slots(self) -> dict[str, float]:
        """Return the first value of each slot of a table's row. A slot has the shape and dtype of the row."""

    def update(
        self,
        values: Mapping[str, Array],
        gradients: Mapping[str, Array],
        slots: Mapping[str, Slots],
        step: int,
    ) -> None:
        """Update all pieces of a server, by name. `step` counts updates from 0.

        `gradients` must not be changed: they may be the worker's memory, sent again if a server dies.
        """

    def update_rows(self, values: Array, gradients: Array, slots: Slots, step: int) -> None:
        """Update some rows of a table, all [rows, ...]: copies, which the caller writes back."""


@runtime_checkable
class InitialisingUpdater(Protocol):
    """An updater whose first slots depend on the first values of the pieces."""

    def initialise(self, values: Mapping[str, Array], slots: Mapping[str, Slots]) -> None:
        """Fill the slots for these first values of the pieces."""


@runtime_checkable
class FinalizingUpdater(Protocol):
    """An updater whose final values aren't those of its last update."""

    def finalize(self, values: Mapping[str, Array], slots: Mapping[str, Slots]) -> None:
        """Write the final values of a training into the pieces, such as averages over its updates."""


def record_staleness(updater: object, staleness: int) -> None:
    """Tell an updater that asks for it, by an attribute `staleness`, how many updates there were since the
    values that the next gradients were computed on. Not called in mode sync."""
    if getattr(updater, "staleness", None) is not None:
        updater.staleness = staleness  # type: ignore[attr-defined]


def set_learning_rate(updater: object, rate: float) -> None:
    """Have an updater continue with another learning rate. Raises InputError for an updater without one."""
    if not hasattr(updater, "learning_rate"):
        raise InputError(
            "A learning rate can be set where the updater has an attribute `learning_rate`. Received: "
            f"{type(updater).__name__}, which has none. Give it one, or use set_updater"
        )
    updater.learning_rate = rate


class ElementwiseUpdater:
    """Base of the updaters here: weight decay, clipping, and a learning rate that may be a schedule.

    Args:
        learning_rate: a number, or a function of the step that returns one.
        weight_decay: decoupled, as in Keras: values shrink by `learning_rate * weight_decay` before the
            update.
        clip_value: bound of each element of a gradient.

    Raises InputError for bad settings.
    """

    elementwise = True
    #: (name, first value) of each slot.
    state: tuple[tuple[str, float], ...] = ()

    def __init__(
        self,
        learning_rate: float | Callable[[int], float],
        *,
        weight_decay: float = 0.0,
        clip_value: float | None = None,
    ) -> None:
        if not callable(learning_rate) and not 0.0 <= learning_rate < math.inf:
            raise InputError(f"learning_rate must be a finite number >= 0. Received: {learning_rate}")
        if clip_value is not None and not clip_value > 0:
            raise InputError(f"clip_value must be above 0. Received: {clip_value}")
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.clip_value = clip_value
        self._scratch_memory: Array | None = None

    def slots(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Array]:
        return {slot: np.full(shape, first, dtype) for slot, first in self.state}

    def row_slots(self) -> dict[str, float]:
        return dict(self.state)

    def update(
        self,
        values: Mapping[str, Array],
        gradients: Mapping[str, Array],
        slots: Mapping[str, Slots],
        step: int,
        copies: Mapping[str, Array] | None = None,
    ) -> None:
        """See `Updater`. New values are copied to `copies` too, while they are in the cache."""
        for name, value in values.items():
            flat, gradient = value.reshape(-1), gradients[name].reshape(-1)
            copy = None if copies is None else copies[name].reshape(-1)
            own = {slot: array.reshape(-1) for slot, array in slots[name].items()}
            if self._update_compiled(flat, gradient, step, copy):
                continue
            for low in range(0, flat.size, BLOCK):
                part = slice(low, low + BLOCK)
                self._update_prepared(flat[part], gradient[part], {s: a[part] for s, a in own.items()}, step)
                if copy is not None:
                    native.copy_and_check(copy[part], flat[part], whole=flat.size)

    def _update_compiled(self, value: Array, gradient: Array, step: int, copy: Array | None) -> bool:
        """Update all in compiled code. Return False if there is none for it: then nothing was done."""
        return False

    def update_rows_compiled(self, rows: Array, numbers: Array, gradients: Array, step: int) -> bool:
        """Update rows of a table in place, by their numbers, in compiled code.

        Return False if there is none for it: then nothing was done.
        """
        return False

    def update_rows(self, values: Array, gradients: Array, slots: Slots, step: int) -> None:
        self.update({"": values}, {"": gradients}, {"": slots}, step)

    def _update_prepared(self, value: Array, gradient: Array, slots: Slots, step: int) -> None:
        rate = self.get_rate(step)
        first, second = self._get_scratch(value)
        if self.clip_value is not None:
            gradient = np.clip(gradient, -self.clip_value, self.clip_value, second)
        if self.weight_decay:
            np.multiply(value, value.dtype.type(rate * self.weight_decay), first)
            value -= first
        self.update_block(value, gradient, slots, rate, step, first)

    def _get_scratch(self, value: Array) -> tuple[Array, Array]:
        """Return two scratch arrays like `value`, which is one block."""
        if self._scratch_memory is None or self._scratch_memory.dtype != value.dtype:
            self._scratch_memory = np.empty((2, BLOCK), value.dtype)
        return self._scratch_memory[0, : value.size], self._scratch_memory[1, : value.size]

    def get_rate(self, step: int) -> float:
        return float(self.learning_rate(step)) if callable(self.learning_rate) else self.learning_rate

    def update_block(
        self, value: Array, gradient: Array, slots: Slots, rate: float, step: int, scratch: Array
    ) -> None:
        """Update one block in place. `scratch` is an array of its size and dtype to use."""
        raise NotImplementedError


class SGD(ElementwiseUpdater):
    """Gradient descent with `momentum`, and Nesterov's variant."""

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.01,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        clip_value: float | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, clip_value=clip_value)
        if not 0.0 <= momentum <= 1.0:
            raise InputError(f"momentum must be in [0, 1]. Received: {momentum}")
        self.momentum = momentum
        self.nesterov = nesterov
        self.state = (("momentum", 0.0),) if momentum else ()

    def _update_compiled(self, value: Array, gradient: Array, step: int, copy: Array | None) -> bool:
        return self._is_plain and native.update_sgd(value, gradient, self.get_rate(step), copy)

    def update_rows_compiled(self, rows: Array, numbers: Array, gradients: Array, step: int) -> bool:
        return self._is_plain and native.update_sgd_rows(rows, numbers, gradients, self.get_rate(step))

    @property
    def _is_plain(self) -> bool:
        return not self.momentum and not self.weight_decay and self.clip_value is None

    def update_block(
        self, value: Array, gradient: Array, slots: Slots, rate: float, step: int, scratch: Array
    ) -> None:
        np.multiply(gradient, value.dtype.type(rate), scratch)
        if not self.momentum:
            value -= scratch
            return
        velocity = slots["momentum"]
        velocity *= value.dtype.type(self.momentum)
        velocity -= scratch
        if self.nesterov:
            value -= scratch
            np.multiply(velocity, value.dtype.type(self.momentum), scratch)
            value += scratch
        else:
            value += velocity


class Adam(ElementwiseUpdater):
    """Adam; with `weight_decay` it is AdamW."""

    state = (("momentum", 0.0), ("velocity", 0.0))

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.001,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float = 0.0,
        clip_value: float | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, clip_value=clip_value)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def update_block(
        self, value: Array, gradient: Array, slots: Slots, rate: float, step: int, scratch: Array
    ) -> None:
        kind = value.dtype.type
        momentum, velocity = slots["momentum"], slots["velocity"]
        alpha = rate * math.sqrt(1 - self.beta_2 ** (step + 1)) / (1 - self.beta_1 ** (step + 1))
        np.subtract(gradient, momentum, scratch)
        scratch *= kind(1 - self.beta_1)
        momentum += scratch
        np.multiply(gradient, gradient, scratch)
        scratch -= velocity
        scratch *= kind(1 - self.beta_2)
        velocity += scratch
        np.sqrt(velocity, scratch)
        scratch += kind(self.epsilon)
        np.divide(momentum, scratch, scratch)
        scratch *= kind(alpha)
        value -= scratch


class Adagrad(ElementwiseUpdater):
    """Adagrad, whose accumulators start at `initial_accumulator_value`."""

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.001,
        *,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        weight_decay: float = 0.0,
        clip_value: float | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, clip_value=clip_value)
        self.epsilon = epsilon
        self.state = (("accumulator", initial_accumulator_value),)

    def update_block(
        self, value: Array, gradient: Array, slots: Slots, rate: float, step: int, scratch: Array
    ) -> None:
        kind = value.dtype.type
        accumulator = slots["accumulator"]
        np.multiply(gradient, gradient, scratch)
        accumulator += scratch
        np.add(accumulator, kind(self.epsilon), scratch)
        np.sqrt(scratch, scratch)
        np.divide(gradient, scratch, scratch)
        scratch *= kind(rate)
        value -= scratch


class Ftrl(ElementwiseUpdater):
    """FTRL-Proximal, as Keras has it (`beta` is added to the adaptive rate)."""

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.001,
        *,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        weight_decay: float = 0.0,
        clip_value: float | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, clip_value=clip_value)
        self.power = learning_rate_power
        self.l1, self.l2 = l1_regularization_strength, l2_regularization_strength
        self.shrinkage, self.beta = l2_shrinkage_regularization_strength, beta
        self.state = (("accumulator", initial_accumulator_value), ("linear", 0.0))

    def update_block(
        self, value: Array, gradient: Array, slots: Slots, rate: float, step: int, scratch: Array
    ) -> None:
        kind = value.dtype.type
        accumulator, linear = slots["accumulator"], slots["linear"]
        l2 = kind(self.l2 + self.beta / (2.0 * rate) if rate else self.l2)
        shrunk = gradient + value * kind(2 * self.shrinkage) if self.shrinkage else gradient
        grown = accumulator + gradient * gradient
        before, after = accumulator ** kind(-self.power), grown ** kind(-self.power)
        linear += shrunk - (after - before) / kind(rate) * value
        quadratic = after / kind(rate) + kind(2) * l2
        np.divide(np.clip(linear, -kind(self.l1), kind(self.l1)) - linear, quadratic, value)
        accumulator[...] = grown


UPDATERS: dict[str, type[ElementwiseUpdater]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": Adam,
    "adagrad": Adagrad,
    "ftrl": Ftrl,
}


def make_updater(config: Mapping[str, Any] | str) -> ElementwiseUpdater:
    """Return the updater of a config such as `{"name": "adam", "learning_rate": 0.001}`, or of a name alone.

    Raises InputError for a name that isn't known or an argument that the updater doesn't take.
    """
    settings = {"name": config} if isinstance(config, str) else dict(config)
    name = str(settings.pop("name", "")).lower()
    if name not in UPDATERS:
        raise InputError(f"An updater is one of {', '.join(sorted(UPDATERS))}. Received: {name!r}")
    try:
        return UPDATERS[name](**settings)
    except TypeError as error:
        raise InputError(f"The updater {name} doesn't take these settings: {error}") from error
