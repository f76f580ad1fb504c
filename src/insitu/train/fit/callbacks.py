"""Callbacks under a strategy: who runs which, how an epoch goes on in its middle, and what they remember."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
from keras.src.utils import is_default

from insitu.train.collectives import copy_value, encode, keep_serializable
from insitu.train.fit.adapter import FeedAdapter

if TYPE_CHECKING:
    from insitu.train.fit.trainer import Binding

WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
"""Callbacks that only write files or send reports: one task does, the others would write over it."""

_KEPT_OUT = {"params", "_params", "model", "_model", "append", "append_header"}
"""What belongs to a callback's life in one process. `CSVLogger` finds out itself whether its file has a
header."""

_COMPARES = "monitor_op"
"""The function by which callbacks compare what they monitor. In a memory it says only that it was chosen."""
_SMALL_BYTES = 1 << 20

_BATCH_EVENTS = ("on_train_batch_begin", "on_train_batch_end", "on_test_batch_begin", "on_test_batch_end")
_OLD_NAMES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
"""What Keras calls where a callback doesn't have the event itself."""


def own_callbacks(callbacks: Any, is_chief: bool) -> list[Any]:
    """The callbacks that this task runs, out of those that the script gives in every task."""
    given = keras.tree.flatten(callbacks) if callbacks else []
    return [c for c in given if is_chief or not isinstance(c, WRITERS)]


class Memory:
    """What the callbacks of a fit remember, as plain values, by class and number in it: `EarlyStopping 0`.

    A script that has changed gives other callbacks: those of both go on, memories of others are dropped.

    Attributes that are no plain values (files, functions, objects) stay behind, and so do those that are as
    they were before the fit: how a callback was set up is the script's. Of writers, which the chief alone
    runs, the other tasks keep what it last told them.
    """

    def __init__(self, given: Sequence[Any], history: Any, is_chief: bool) -> None:
        self._callbacks = _named([*given, history])
        self._is_chief = is_chief
        self._before = {name: _Setup(callback) for name, callback in self._callbacks.items()}
        self.writers: dict[str, dict[str, Any]] = {}

    @property
    def has_writers(self) -> bool:
        return any(isinstance(callback, WRITERS) for callback in self._callbacks.values())

    def read_writers(self) -> dict[str, dict[str, Any]]:
        """What the chief tells the others."""
        return {n: self._read(n) for n, c in self._callbacks.items() if isinstance(c, WRITERS)}

    def read(self) -> dict[str, dict[str, Any]]:
        others = {n: self._read(n) for n, c in self._callbacks.items() if not isinstance(c, WRITERS)}
        return {**others, **(self.read_writers() if self._is_chief else self.writers)}

    def write(self, memory: dict[str, dict[str, Any]]) -> None:
        for name in self._callbacks.keys() & memory.keys():
            callback, attributes = self._callbacks[name], memory[name]
            if isinstance(callback, WRITERS) and not self._is_chief:
                self.writers[name] = attributes
            else:
                self._before[name].return_to(callback)
                _write(callback, attributes)

    def _read(self, name: str) -> dict[str, Any]:
        callback = self._callbacks[name]
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            return {}
        changed = self._before[name].changed(_plain(callback))
        return changed | {_COMPARES: True} if getattr(callback, _COMPARES, None) is not None else changed

    def go_on(self, epoch: int) -> None:
        """The fit goes on in its middle, in `epoch`: what was written of the epochs before stays."""
        for callback in self._callbacks.values() if self._is_chief else ():
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True
                _drop_rows(Path(callback.filename), callback.sep, epoch)


def _named(callbacks: Sequence[Any]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    numbers: Counter[str] = Counter()
    for callback in callbacks:
        kind = type(callback).__qualname__
        names[f"{kind} {numbers[kind]}"] = callback
        numbers[kind] += 1
    return names


def _drop_rows(path: Path, separator: str, epoch: int) -> None:
    """Takes the rows of `epoch` and later ones out of a CSVLogger's file: they will be written again."""
    try:
        lines = path.read_text().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return

    def stays(line: str) -> bool:
        first = line.partition(separator)[0]
        return line.endswith("\n") and not (first.isdecimal() and int(first) >= epoch)

    kept = [line for line in lines if stays(line)]
    if kept != lines:
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        staged.write_text("".join(kept))
        staged.replace(path)


def _plain(callback: Any) -> dict[str, Any]:
    return keep_serializable({n: v for n, v in vars(callback).items() if n not in _KEPT_OUT})


class _Setup:
    """The plain attributes of a callback before a fit. Large arrays are told apart by identity: those that
    are the same objects as before aren't looked at."""

    def __init__(self, callback: Any) -> None:
        self._values: dict[str, Any] = {}
        self._taken: dict[str, str] = {}
        for name, value in _plain(callback).items():
            payload = encode(value)
            if any(array.nbytes > _SMALL_BYTES for array in payload.arrays):
                self._values[name] = value
            else:
                self._values[name] = copy_value(value)
                self._taken[name] = _text(value)

    def changed(self, now: dict[str, Any]) -> dict[str, Any]:
        """Those of the attributes that aren't as they were."""
        return {name: value for name, value in now.items() if not self._same(name, value)}

    def _same(self, name: str, value: Any) -> bool:
        if name in self._taken:
            return self._taken[name] == _text(value)
        return name in self._values and self._values[name] is value

    def return_to(self, callback: Any) -> None:
        """All are again as they were, but for those that hold something else than plain values by now."""
        now = _plain(callback)
        for name, value in self._values.items():
            if name not in now:
                continue
            setattr(callback, name, copy_value(value) if name in self._taken else value)


def _text(value: Any) -> str:
    """The same for the same small value."""
    payload = encode(value)
    if any(array.nbytes > _SMALL_BYTES for array in payload.arrays):
        return ""
    return json.dumps([payload.tree, payload.specs, [array.tobytes().hex() for array in payload.arrays]])


def _write(callback: Any, memory: dict[str, Any]) -> None:
    if memory.get(_COMPARES) and getattr(callback, _COMPARES, None) is None:
        # What Keras does at the first epoch's end, which also changes the sign of a plain value.
        callback._set_monitor_op()
    vars(callback).update({name: value for name, value in memory.items() if name != _COMPARES})


def _hears(callback: Any, event: str) -> bool:
    """Whether a callback does something at an event of batches."""
    if not getattr(callback, "hears_batches", True):
        return False
    if type(callback) is keras.callbacks.ProgbarLogger and callback.verbose != 1:
        return False  # it would count them; its list tells it the number
    names = (event, _OLD_NAMES.get(event, event))
    return not all(is_default(getattr(callback, name, None)) for name in names)


class EpochCallbacks(keras.callbacks.CallbackList):
    """Keras' list of callbacks, which here also says where each epoch begins.

    After a restart an epoch begins in its middle: its first steps are skipped, and no callback hears of them,
    so that step numbers, progress bars and schedules go on where they were.

    Where no callback does anything at the end of a batch, nobody is called then: a call in Keras' way, by a
    thread, with the logs as Python's numbers, takes as long as the step of a small model.
    """

    def __init__(
        self, binding: Binding, adapter: FeedAdapter, given: list[Any], is_chief: bool, **params: Any
    ) -> None:
        self._binding = binding
        self._adapter = adapter
        self._skip = 0
        self._batches = 0
        self._heard = frozenset(_BATCH_EVENTS)
        self.due: list[Callable[[], None]] = []
        """What to do once all callbacks have heard of the present event."""
        own = own_callbacks(given, is_chief)
        super().__init__(
            # What restores comes first: the others begin by what it has found.
            sorted(own, key=lambda callback: not hasattr(callback, "restores_training")),
            add_history=True,
            add_progbar=params["verbose"] != 0,
            model=binding.model,
            **params,
        )
        self.memory = Memory(given, self._history, is_chief)

    def _do_what_is_due(self) -> None:
        due, self.due = self.due, []
        for action in due:
            action()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        resumed_epoch, step = self._binding.position
        self._skip = step if epoch == resumed_epoch else 0
        self._binding.begin_epoch(epoch, self._skip)
        self._adapter.position = (epoch, self._skip)
        self._binding.remember(epoch, begun=False)
        super().on_epoch_begin(epoch, logs)
        self._binding.remember(epoch, begun=True)
        # Now, since a callback may have made its methods at the epoch's beginning.
        self._heard = frozenset(e for e in _BATCH_EVENTS if any(_hears(c, e) for c in self.callbacks))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if "on_train_batch_begin" in self._heard and batch >= self._skip:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches = batch + 1
        if batch >= self._skip:
            if "on_train_batch_end" in self._heard:
                super().on_train_batch_end(batch, logs)
            if self.due:
                self._do_what_is_due()
        elif batch == self._skip - 1:
            self._binding.end_of_skipped()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if "on_test_batch_begin" in self._heard and batch >= self._binding.tests_to_skip:
            super().on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if "on_test_batch_end" in self._heard and batch >= self._binding.tests_to_skip:
            super().on_test_batch_end(batch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        # Where the whole fit was done before, no epoch has begun.
        self._binding.remember(self._binding.position[0], begun=False)
        self._binding.end_fit()
        super().on_train_end(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._binding.position = (epoch + 1, 0)
        if self._progbar is not None:
            self._progbar.seen = self._batches
        super().on_epoch_end(epoch, logs)
        self._binding.end_epoch(epoch)
        self._do_what_is_due()
