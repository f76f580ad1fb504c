"""Carries over what callbacks remember, to a task that takes up a fit in its middle."""

from __future__ import annotations

import dis
import functools
import inspect
import json
import logging
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from insitu.grid import publish_file
from insitu.train.collectives import copy_value, encode, keep_serializable

WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
"""Callbacks that only write files or send reports: one task does, the others would write over it."""

_LEFT_OUT = {"params", "_params", "model", "_model", "append", "append_header"}
"""Attributes that belong to a callback in one process. `CSVLogger` finds out itself whether its file has a
header."""

_MONITOR_OP = "monitor_op"
"""The function by which callbacks compare what they monitor. A state dict says only that it was chosen."""
_SMALL_BYTES = 1 << 20

_FILLED = {"history"}
"""Attributes that a callback of Keras sets once, in `__init__`, and fills later."""
_SET_UP = ("__init__", "set_model")
"""Methods that set a callback up."""
_LOG = logging.getLogger("insitu")

StateDict = dict[str, dict[str, Any]]
"""Attributes of callbacks, by class and number in it: `EarlyStopping 0`."""


class CallbackMemory:
    """The plain values that the callbacks of a fit remember.

    A script that has changed gives other callbacks: those of both go on, the state of others is dropped.

    Attributes that are no plain values (files, functions, objects) stay behind, and so do those that are as
    they were before the fit: how a callback was set up is the script's. Of writers, which the chief alone
    runs, the other tasks keep what it last sent them.
    """

    def __init__(self, given: Sequence[Any], history: Any, is_chief: bool) -> None:
        #: The callbacks that the script gives in every task, and Keras' History, by name.
        self._callbacks = _named([*given, history])
        self._is_chief = is_chief
        self._before = {name: _InitialAttributes(callback) for name, callback in self._callbacks.items()}
        #: What the chief last sent of its writers. Written by `KerasTrainer` at the end of each epoch.
        self.writers: StateDict = {}

    @property
    def has_writers(self) -> bool:
        """Whether some of the callbacks are run by the chief alone."""
        return any(isinstance(callback, WRITERS) for callback in self._callbacks.values())

    def writers_state_dict(self) -> StateDict:
        """Return what the chief sends the others."""
        return {n: self._read(n) for n, c in self._callbacks.items() if isinstance(c, WRITERS)}

    def state_dict(self) -> StateDict:
        """Return what all callbacks remember."""
        others = {n: self._read(n) for n, c in self._callbacks.items() if not isinstance(c, WRITERS)}
        return {**others, **(self.writers_state_dict() if self._is_chief else self.writers)}

    def load_state_dict(self, state: StateDict) -> None:
        """Give the callbacks what they remembered in another task or another run of the script."""
        for name in self._callbacks.keys() & state.keys():
            callback, attributes = self._callbacks[name], state[name]
            if isinstance(callback, WRITERS) and not self._is_chief:
                self.writers[name] = attributes
            else:
                self._before[name].restore(callback)
                _write(callback, attributes)

    def _read(self, name: str) -> dict[str, Any]:
        callback = self._callbacks[name]
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            return {}
        changed = self._before[name].find_changed(_plain(callback))
        return changed | {_MONITOR_OP: True} if getattr(callback, _MONITOR_OP, None) is not None else changed

    def append_to_logs(self, epoch: int) -> None:
        """Have writers append to the files that they wrote in the epochs before `epoch`."""
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
    """Take the rows of `epoch` and later ones out of a CSVLogger's file: they will be written again."""
    try:
        lines = path.read_bytes().decode().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return

    def stays(line: str) -> bool:
        first = line.partition(separator)[0]
        return line.endswith("\n") and not (first.isdecimal() and int(first) >= epoch)

    kept = [line for line in lines if stays(line)]
    if kept != lines:
        publish_file(path, "".join(kept).encode(), stat.S_IMODE(path.stat().st_mode))


def _plain(callback: Any) -> dict[str, Any]:
    values = {n: v for n, v in vars(callback).items() if is_memory(type(callback), n)}
    return keep_serializable(values)


def is_memory(kind: type, name: str) -> bool:
    """Return whether an attribute of callbacks of this class may be something that they remember.

    How they were set up (`ModelCheckpoint.filepath`) is the script's, and methods are their class's.
    """
    if name in _LEFT_OUT or not name.isidentifier() or (name.startswith("__") and name.endswith("__")):
        return False
    of_class = inspect.getattr_static(kind, name, None)
    if callable(of_class) or hasattr(type(of_class), "__get__"):
        return False
    return name not in _set_up_once(kind)


@functools.cache
def _set_up_once(kind: type) -> frozenset[str]:
    """Return the attributes that Keras' own classes above `kind` set when they are set up, and then never."""
    first: set[str] = set()
    later: set[str] = set(_FILLED)
    for cls in kind.__mro__:
        if not cls.__module__.startswith("keras."):
            continue
        for name, method in vars(cls).items():
            if inspect.isfunction(method):
                stored = {i.argval for i in dis.get_instructions(method) if i.opname == "STORE_ATTR"}
                (first if name in _SET_UP else later).update(stored)
    return frozenset(first - later)


class _InitialAttributes:
    """The plain attributes of a callback before a fit. Large arrays are compared by identity only."""

    def __init__(self, callback: Any) -> None:
        #: The attributes; small ones are copies.
        self._values: dict[str, Any] = {}
        #: Small values as text, to compare by.
        self._texts: dict[str, str] = {}
        for name, value in _plain(callback).items():
            payload = encode(value)
            if any(array.nbytes > _SMALL_BYTES for array in payload.arrays):
                self._values[name] = value
            else:
                self._values[name] = copy_value(value)
                self._texts[name] = _text(value)

    def find_changed(self, now: dict[str, Any]) -> dict[str, Any]:
        """Return those of the attributes that aren't as they were."""
        return {name: value for name, value in now.items() if not self._same(name, value)}

    def _same(self, name: str, value: Any) -> bool:
        if name in self._texts:
            return self._texts[name] == _text(value)
        return name in self._values and self._values[name] is value

    def restore(self, callback: Any) -> None:
        """Set all attributes back, but for those that hold something else than plain values by now."""
        now = _plain(callback)
        for name, value in self._values.items():
            if name not in now:
                continue
            setattr(callback, name, copy_value(value) if name in self._texts else value)


def _text(value: Any) -> str:
    """Return a text that is the same for the same small value."""
    payload = encode(value)
    if any(array.nbytes > _SMALL_BYTES for array in payload.arrays):
        return ""
    return json.dumps([payload.tree, payload.specs, [array.tobytes().hex() for array in payload.arrays]])


def _write(callback: Any, attributes: dict[str, Any]) -> None:
    if attributes.get(_MONITOR_OP) and getattr(callback, _MONITOR_OP, None) is None:
        # Keras does so at the first epoch's end, which also changes the sign of a plain value.
        callback._set_monitor_op()
    for name, value in attributes.items():
        if name == _MONITOR_OP:
            continue
        if not is_memory(type(callback), name) or not _is_plain(vars(callback).get(name)):
            _LOG.warning(
                "A checkpoint would set %s.%s, which insitu never saves. It is left as it is",
                type(callback).__name__,
                name,
            )
            continue
        vars(callback)[name] = value


def _is_plain(value: Any) -> bool:
    return bool(keep_serializable({"": value}))
