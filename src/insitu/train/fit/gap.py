"""Remembers what callbacks find when they are called, so that another task can call them again."""

from __future__ import annotations

import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from keras.src.backend.common.variables import Variable
from numpy.typing import NDArray

from insitu.train.backends import active_backend
from insitu.train.replica import ModelState, view

_RAW_ASSIGNMENTS = re.compile(
    r"assign(_add|_sub)?|(batch_)?scatter_\w+|_strided_slice_assign|load|count_up_to"
)
"""Operations that change a variable of TensorFlow, by its methods' names."""


class Gap:
    """Changes since the last unit of a fit, by callbacks and by Keras' loop around them.

    A task that takes another's place begins behind the last unit, and calls callbacks again. It must find
    what they found the first time, not what they have made of it. Nothing is copied but what changes, and
    only while a gap is open.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        #: Values of variables before they were assigned, by the id of what holds them. Written by `note`.
        self._values: dict[int, tuple[Any, NDArray[Any]]] = {}
        #: `model.stop_training` when the gap opened.
        self._stop_training = False
        #: States of the process' random generators when it opened; empty if nobody has drawn since.
        self._random: dict[str, Any] = {}
        #: Whether callbacks have been called since the last unit. Written by `open` and `close`.
        self.is_open = False

    def open(self, *, with_random: bool = True) -> None:
        """Remember what is there, until `close`. Called before callbacks are, as often as that happens. Not
        `with_random`: none of those draws random numbers."""
        if with_random and not self._random:
            self._random = read_random_states()
        if not self.is_open:
            self.is_open = True
            self._stop_training = bool(getattr(self._model, "stop_training", False))
            _install()
        _open_gaps.add(self)

    def pause(self) -> None:
        """Note no more changes, until the gap is opened again or closed: a unit begins."""
        _open_gaps.discard(self)

    def close(self) -> None:
        """Forget all: a unit was done."""
        self.pause()
        self.is_open, self._values, self._random = False, {}, {}

    def rebase(self) -> None:
        """Take the variables as they are now for what was there at first: a checkpoint was read."""
        self._values = {}

    def note(self, holder: Any, read: Callable[[], NDArray[Any]]) -> None:
        """Keep a value that is about to be assigned to."""
        if id(holder) not in self._values:
            self._values[id(holder)] = holder, read()

    def views(self, state: ModelState) -> dict[str, NDArray[Any]]:
        """Return every variable's value by name, as it was when the gap opened."""
        return {name: self._value(variable) for name, variable in state.named()}

    def _value(self, variable: Any) -> NDArray[Any]:
        kept = self._values.get(id(active_backend().raw_variable(variable)))
        return view(variable) if kept is None else kept[1]

    @property
    def stop_training(self) -> bool:
        """The model's attribute as it was when the gap opened."""
        return self._stop_training if self.is_open else bool(getattr(self._model, "stop_training", False))

    @property
    def random_states(self) -> dict[str, Any]:
        """States of the process' random generators as they were when the gap opened."""
        return self._random or read_random_states()

    @contextlib.contextmanager
    def reverting(self) -> Iterator[None]:
        """While open, changes of variables are noted; they are undone at the end, and so is a request to stop
        training."""
        stop_training = bool(getattr(self._model, "stop_training", False))
        self.open()
        try:
            yield
        finally:
            self.pause()
            self._model.stop_training = stop_training
            for holder, value in self._values.values():
                holder.assign(value)
            self.close()


def read_random_states() -> dict[str, Any]:
    """Return the states of Python's and NumPy's generators, as plain values."""
    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": (kind, keys, *rest)}


def load_random_states(states: dict[str, Any]) -> None:
    """Set the states that `read_random_states` has read."""
    if states:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])


def find_drawn(before: dict[str, Any]) -> dict[str, Any]:
    """Return the states now, or nothing if nobody has drawn a number since `before`."""
    now = read_random_states()
    (kind, keys, *rest), (kind_before, keys_before, *rest_before) = now["numpy"], before["numpy"]
    same = (kind, rest) == (kind_before, rest_before) and np.array_equal(keys, keys_before)
    return {} if same and now["python"] == before["python"] else now


_open_gaps: set[Gap] = set()
"""Gaps in which changes are noted: one, unless a callback trains another model."""


@functools.cache
def _install() -> None:
    """Have assignments to variables notify the open gaps. Done once: each costs a look at a set then."""
    owners = active_backend().raw_variable_types()
    if not owners:
        _watch(Variable, "assign", lambda variable: np.array(view(variable)))
    for owner in owners:
        for name in list(vars(owner)):
            if _RAW_ASSIGNMENTS.fullmatch(name):
                _watch(owner, name, lambda variable: np.array(variable.numpy()))


def _watch(owner: type, name: str, read: Callable[[Any], NDArray[Any]]) -> None:
    original = vars(owner)[name]

    @functools.wraps(original)
    def assign(holder: Any, *args: Any, **kwargs: Any) -> Any:
        if _open_gaps and not active_backend().is_tracing():
            for gap in _open_gaps:
                gap.note(holder, lambda: read(holder))
        return original(holder, *args, **kwargs)

    setattr(owner, name, assign)
