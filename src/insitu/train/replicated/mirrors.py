"""Copies of a model's variables on further devices, kept equal to the variables that Keras knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from insitu.train.replica.tensorflow_calls import compile_function

_ATTRIBUTE = "_insitu_mirrors"
_COPIES = "_insitu_copies"
_SCATTERS = ("update", "add", "sub", "mul", "div", "max", "min", "nd_update", "nd_add", "nd_sub")
_ASSIGNING = (
    *("assign", "assign_add", "assign_sub", "batch_scatter_update"),
    *(f"scatter_{name}" for name in _SCATTERS),
)
_RESTORING = "_restore_from_tensors"
"""What `tf.train.Checkpoint` calls, also while it traces a function that it calls at once."""


class MirroredVariables:
    """A `tf.Variable` for each Keras variable of `variables`, on each device but the first.

    On the first device that is the Keras variable's own. `on(i)` puts those of device `i` into their places,
    so that whatever is traced inside reads and writes them: any layer, any `train_step`, any optimizer.

    A step leaves all devices equal. What is assigned between steps, by callbacks, `set_weights` or a metric's
    reset, reaches the first device only; then `refresh` copies it to the others. Assignments by a compiled
    function of the user's own aren't seen.
    """

    def __init__(self, variables: Sequence[Any], devices: Sequence[str]) -> None:
        self.variables = tuple(variables)
        self._devices = tuple(devices)
        self._own = [variable._value for variable in self.variables]
        # Others may have made copies before, and not have heard of what was assigned since.
        self.stale = any(hasattr(own, _COPIES) for own in self._own)
        self._copies: list[list[Any]] = [self._own]
        self._copies += [[_copy_on(device, own) for own in self._own] for device in self._devices[1:]]
        for own in self._own:
            _call_on_assign(own, self._mark_stale)
        self._copy = compile_function(self.trace_copying, autograph=False)

    def _mark_stale(self) -> None:
        self.stale = True

    @contextmanager
    def swapped_in(self, index: int) -> Iterator[None]:
        """While open, the Keras variables use the values of device `index`."""
        for variable, copy in zip(self.variables, self._copies[index], strict=True):
            variable._value = copy
        try:
            yield
        finally:
            for variable, own in zip(self.variables, self._own, strict=True):
                variable._value = own

    def refresh(self) -> None:
        """Copy the first device's values to all others."""
        self._copy()
        self.stale = False

    def trace_copying(self) -> None:
        values = [own.read_value() for own in self._own]
        for device, copies in zip(self._devices[1:], self._copies[1:], strict=True):
            with tf.device(device):
                for copy, value in zip(copies, values, strict=True):
                    copy.assign(value)


def mirror_variables(model: Any, variables: Sequence[Any], devices: Sequence[str]) -> MirroredVariables:
    """Return the mirrored variables of `model`, made once: its steps for batches of all structures share
    them."""
    mirrors: MirroredVariables | None = getattr(model, _ATTRIBUTE, None)
    if mirrors is None or list(map(id, mirrors.variables)) != list(map(id, variables)):
        mirrors = MirroredVariables(variables, devices)
        # Around Keras' tracking: copies are no part of the model's state.
        object.__setattr__(model, _ATTRIBUTE, mirrors)
    return mirrors


def _copy_on(device: str, own: Any) -> Any:
    """Return the copy of a variable on a further device. There is one for all models and steps that use
    it."""
    copies = own.__dict__.setdefault(_COPIES, {})
    if device not in copies:
        with tf.device(device):
            copies[device] = copy = tf.Variable(own.read_value(), trainable=own.trainable, dtype=own.dtype)
        # Keras' optimizers find what belongs to a variable by this.
        copy._unique_id = own._unique_id
    return copies[device]


def _call_on_assign(own: Any, changed: Any) -> None:
    """Call `changed` for each assignment outside of graphs."""

    def wrap(assign: Any, in_graphs: bool = False) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if in_graphs or not tf.inside_function():
                changed()
            return assign(*args, **kwargs)

        return call

    for name in _ASSIGNING:
        setattr(own, name, wrap(getattr(own, name)))
    setattr(own, _RESTORING, wrap(getattr(own, _RESTORING), in_graphs=True))
