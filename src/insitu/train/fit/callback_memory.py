"""Carries over what callbacks remember, to a task that takes up a fit in its middle."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import json
import logging
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import xxhash

from insitu.base.serialization import NotSerializable, copy_value, encode, keep_serializable
from insitu.train.fit.held_objects import CantBeCarried, can_read, read_object, write_object
from insitu.train.fit.writer_files import Marks, appending, mark_files, rewind_files

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
_MAX_DEPTH = 20

_UNCOPIED, _FILES, _HASH, _OBJECTS = "#uncopied", "#files", "#hash", "#objects"
"""Beside a callback's attributes: the names of those that can't be copied and were set while a fit lasts,
with the event that set each; how far its files were written; what the objects hold that it keeps; in place of
attributes that aren't sent: their hash."""
_SMALL_STATE = 1 << 16
"""Bytes of a callback's state up to which the chief sends it along. Replicas run the same callbacks, so that
others have what is larger, unless hashes differ."""
_LONG = 64
"""Elements of a list from which on only some are looked at, to see whether it holds further containers."""

_VALUES = (
    *(type(None), bool, int, float, str, bytes, np.ndarray, np.generic),
    *(list, tuple, dict, set, frozenset, deque),
)
"""Kinds of attributes that are copied as they are, or can't be."""

_FILLED = {"history"}
"""Attributes that a callback of Keras sets once, in `__init__`, and fills later."""
_SET_UP = ("__init__", "set_model")
"""Methods that set a callback up."""
_LOG = logging.getLogger("insitu")
_named_at_start: set[str] = set()
"""Attributes that `warn_at_start` has named in this process."""

StateDict = dict[str, dict[str, Any]]
"""Attributes of callbacks, by class and number in it: `EarlyStopping 0`."""


def is_of_chief(callback: Any) -> bool:
    """Return whether the chief alone runs a callback: it writes files, or says so."""
    return isinstance(callback, WRITERS) or bool(getattr(callback, "runs_in_chief_alone", False))


class CallbackMemory:
    """The plain values that the callbacks of a call remember, and how far their files were written.

    A script that has changed gives other callbacks: those of both continue, the state of others is dropped.

    Attributes that are no plain values (files, functions, objects) stay behind, and so do those that are as
    they were before the fit: how a callback was set up is the script's. The other tasks keep what the chief
    last sent them of the state that it alone has.
    """

    def __init__(self, given: Sequence[Any], history: Any, is_chief: bool) -> None:
        #: The callbacks that the script gives in every task, and a fit's History, by name.
        self._callbacks = _named([*given, *([] if history is None else [history])])
        self._is_chief = is_chief
        self._before = {name: _InitialAttributes(callback) for name, callback in self._callbacks.items()}
        #: State that the chief sent before the last unit that was done, by name. Written by `release`.
        self._of_chief: StateDict = {}
        #: State that it has sent since; None for state that this task has, too. Written by `take_sent`.
        self._sent: dict[str, dict[str, Any] | None] = {}
        #: Those that would write no header in the next fit, since their file was appended to in this one.
        self._without_header: list[Any] = []
        #: Attributes as they were when callbacks were first called since the last unit. Written by `keep`.
        self._kept: dict[str, dict[str, Any]] = {}
        #: Attributes that can't be copied, with the event at whose end they were there, by callback's name.
        #: Written by `record_uncopied`.
        self._uncopied: dict[str, dict[str, tuple[str, Any]]] = {}
        #: Names of callbacks that the chief sends, since the other tasks have another state or none.
        self._differing: set[str] = set()

    def record_uncopied(self, event: str) -> None:
        """Note which attributes callbacks have set in `event`, the beginning of something, that can't be
        copied: in another process they are made by that event."""
        for name, callback in self._callbacks.items():
            known = self._uncopied.setdefault(name, {})
            for attribute in self._before[name].find_uncopied(vars(callback)):
                value = vars(callback)[attribute]
                if attribute not in known or known[attribute][1] is not value:
                    known[attribute] = event, value

    def keep(self, callbacks: Sequence[Any] | None = None) -> None:
        """Remember what callbacks are like, who are about to be called; None: all. Until `release`."""
        for name, callback in self._callbacks.items():
            if name not in self._kept and (callbacks is None or any(callback is one for one in callbacks)):
                objects = _read_objects(callback)
                marks = {_FILES: self._mark_files(callback), _OBJECTS: objects}
                self._kept[name] = _copy_attributes(callback) | marks

    def release(self) -> None:
        """Forget what `keep` has kept, and take over what the chief has sent: a unit was done."""
        self._kept = {}
        for name, state in self._sent.items():
            if state is None:
                self._of_chief.pop(name, None)
            else:
                self._of_chief[name] = state
        self._sent = {}

    def close(self) -> None:
        """Let the callbacks begin another fit as they would have without this one's entry."""
        for callback in self._without_header:
            callback.append_header = True
        self._without_header = []

    def _mark_files(self, callback: Any) -> Marks:
        return mark_files(callback) if self._is_chief else {}

    # The chief informs the others

    def chief_state_dict(self, callbacks: Sequence[Any] | None = None) -> StateDict:
        """Return what the chief sends of its callbacks as they are now; None: of all. State that is large,
        and may be the same in all tasks, isn't sent: only its hash, as `#hash`."""
        states: StateDict = {}
        for name, callback in self._callbacks.items():
            if callbacks is not None and not any(callback is one for one in callbacks):
                continue
            state = self._read_now(name)
            is_sent = is_of_chief(callback) or name in self._differing
            # Asked last: it takes longest, and this may be done in each step.
            if is_sent or _count_bytes(state) <= _SMALL_STATE:
                states[name] = state
            else:
                states[name] = {_HASH: _hash(state)}
        return states

    def take_sent(self, sent: StateDict) -> list[str]:
        """Keep what the chief has sent, which counts once the unit under way is done: until then callbacks
        may be called again. Return the names of callbacks whose state is another one there."""
        missing = []
        for name, state in sent.items():
            if _HASH not in state:
                self._sent[name] = state
            elif name not in self._callbacks or _hash(self._read_now(name)) != (state[_HASH]):
                missing.append(name)
            else:
                self._sent[name] = None
        return missing

    @staticmethod
    def is_hash(state: dict[str, Any]) -> bool:
        """Return whether a state that the chief has sent is only its hash."""
        return _HASH in state

    def send_from_now_on(self, names: Iterable[str]) -> None:
        """Have the chief send the state of these callbacks in full."""
        self._differing.update(names)

    # Another process continues

    def state_dict(self) -> StateDict:
        """Return what all callbacks remember, those of the chief as far as this task knows."""
        own = self.read_all()
        return own if self._is_chief else own | self._of_chief

    def transfer(self) -> dict[str, StateDict]:
        """Return what a task needs that takes another's place, for `receive`."""
        own = self._own_state_dict()
        return {"own": own, "of_chief": own if self._is_chief else self._of_chief}

    def receive(self, transferred: dict[str, StateDict]) -> StateDict:
        """Take what another task has transferred; return what is this task's of it, for `load_state_dict`."""
        own, self._of_chief = transferred["own"], dict(transferred["of_chief"])
        return own | self._of_chief if self._is_chief else own

    def read_all(self) -> StateDict:
        """Return what this task's callbacks remember now."""
        return {name: self._read_now(name) for name in self._callbacks}

    def _own_state_dict(self) -> StateDict:
        return {name: self._read_kept(name) for name in self._callbacks}

    def _read_kept(self, name: str) -> dict[str, Any]:
        if name not in self._kept:
            return self._read_now(name)
        kept = dict(self._kept[name])
        return self._read(name, kept, kept.pop(_FILES), kept.pop(_OBJECTS))

    def _read_now(self, name: str) -> dict[str, Any]:
        callback = self._callbacks[name]
        return self._read(name, vars(callback), self._mark_files(callback), _read_objects(callback))

    def load_state_dict(self, state: StateDict) -> None:
        """Give the callbacks what they remembered in another task or another run of the script."""
        for name in self._callbacks.keys() & state.keys():
            callback = self._callbacks[name]
            if self._is_chief or not is_of_chief(callback):
                self._before[name].restore(callback)
                # A copy: it may be given to them again.
                _write(callback, copy_value(state[name]))

    @contextlib.contextmanager
    def continuing_files(self, state: StateDict, writers: Sequence[str]) -> Iterator[None]:
        """Take out of the chief's files what was written behind `state`: it will be written again. `writers`
        are the processes that have written them. While open, callbacks that open a file of their own append
        to it."""
        marks = {n: state[n].get(_FILES, {}) for n in state if n in self._callbacks} if self._is_chief else {}
        for name, mark in marks.items():
            rewind_files(self._callbacks[name], mark, writers)
        with appending(self._callbacks[name] for name, mark in marks.items() if mark) as opened:
            yield
        self._without_header += opened

    def warn_of_uncopied(self, state: StateDict) -> None:
        """Name what callbacks of users keep that can't be copied from another process."""
        for name in self._callbacks.keys() & state.keys():
            callback, made = self._callbacks[name], state[name].get(_UNCOPIED) or {}
            if not is_of_user(callback):
                continue
            for attribute, event in made.items():
                if attribute not in state[name].get(_OBJECTS, {}):
                    remedy = f"{event} is called again, to make another" if event else "nothing makes another"
                    _warn(callback, attribute, remedy)
            for attribute in self._before[name].find_unreadable():
                if attribute not in made:
                    _warn(callback, attribute, "it is as the script made it, whatever was done with it since")

    def warn_at_start(self, on_loss: str) -> None:
        """Name what callbacks of users keep that nobody can carry over, before it is lost."""
        names = [
            f"{type(callback).__name__}.{attribute}"
            for name, callback in self._callbacks.items()
            if is_of_user(callback)
            for attribute in self._before[name].find_unreadable()
        ]
        new = [name for name in dict.fromkeys(names) if name not in _named_at_start]
        _named_at_start.update(new)
        if new:
            sys.stderr.write(
                f"[insitu] With --on-loss {on_loss} the next process of a lost task has these attributes of "
                f"callbacks as the script makes them, whatever was done with them: {', '.join(new)}\n"
            )

    def is_made_by(self, event: str, callback: Any, state: StateDict) -> bool:
        """Return whether a callback has something from `event` that can't be copied from another process.
        True for one of which `state` has nothing: it hasn't received the event."""
        name = next((name for name, one in self._callbacks.items() if one is callback), None)
        if name is None or _UNCOPIED not in state.get(name, {}):
            return True
        return event in state[name][_UNCOPIED].values()

    def _read(
        self, name: str, attributes: dict[str, Any], files: Marks, objects: dict[str, Any]
    ) -> dict[str, Any]:
        callback = self._callbacks[name]
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            return {_UNCOPIED: {}}
        before = self._before[name]
        plain = _plain(type(callback), attributes)
        state = before.find_changed(plain)
        if attributes.get(_MONITOR_OP) is not None and hasattr(callback, "_set_monitor_op"):
            state[_MONITOR_OP] = True
        events = {attribute: event for attribute, (event, _) in self._uncopied.get(name, {}).items()}
        state[_UNCOPIED] = {a: events.get(a, "") for a in before.find_uncopied(attributes)}
        return state | ({_FILES: files} if files else {}) | ({_OBJECTS: objects} if objects else {})


def _read_objects(callback: Any) -> dict[str, Any]:
    """Return what the objects hold that a callback of the user's keeps, by attribute."""
    found: dict[str, Any] = {}
    if not is_of_user(callback):
        return found
    # Only objects count, which are few: this is done in each step that callbacks receive.
    held = {
        name: value
        for name, value in vars(callback).items()
        if name not in _LEFT_OUT and not isinstance(value, _VALUES)
    }
    of_model = _model_variables(callback) if held else set()
    for name, value in held.items():
        with contextlib.suppress(CantBeCarried):
            found[name] = read_object(value, of_model)
    return {name: state for name, state in found.items() if state}


def _model_variables(callback: Any) -> set[int]:
    model = getattr(callback, "model", None)
    optimizer = getattr(model, "optimizer", None)
    return {id(one) for holder in (model, optimizer) for one in getattr(holder, "variables", ())}


def is_of_user(callback: Any) -> bool:
    """Return whether a callback's class is neither Keras' nor insitu's."""
    return type(callback).__module__.partition(".")[0] not in ("keras", "insitu")


def _named(callbacks: Sequence[Any]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    numbers: Counter[str] = Counter()
    for callback in callbacks:
        kind = type(callback).__qualname__
        names[f"{kind} {numbers[kind]}"] = callback
        numbers[kind] += 1
    return names


def _copy_attributes(callback: Any) -> dict[str, Any]:
    """Return a callback's attributes, with copies of what may change in place."""
    return {name: _copy_container(value) for name, value in vars(callback).items()}


def _copy_container(value: Any, depth: int = 0) -> Any:
    kind = type(value)
    if kind is np.ndarray:
        return value.copy()
    if kind is dict and depth < _MAX_DEPTH:
        return {key: _copy_container(item, depth + 1) for key, item in value.items()}
    if kind in (list, tuple) and depth < _MAX_DEPTH:
        # A list that grows by a number in each step would take longer each time.
        some = value if len(value) < _LONG else (*value[: _LONG // 2], *value[-_LONG // 2 :])
        if any(type(item) in (list, dict, tuple, np.ndarray) for item in some):
            return kind(_copy_container(item, depth + 1) for item in value)
        return value.copy() if kind is list else value
    if isinstance(value, (dict, set, deque)):
        with contextlib.suppress(NotSerializable):
            return copy_value(value)
    return value


def _plain(kind: type, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return keep_serializable({n: v for n, v in attributes.items() if is_memory(kind, n)})


def _count_bytes(state: Any) -> int:
    payload = encode(state)
    return len(json.dumps(payload.tree)) + sum(array.nbytes for array in payload.arrays)


def _hash(state: dict[str, Any]) -> str:
    payload = encode({name: value for name, value in state.items() if name not in (_UNCOPIED, _FILES)})
    digest = xxhash.xxh3_128(json.dumps([payload.tree, payload.specs]).encode())
    for array in payload.arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return str(digest.hexdigest())


@functools.lru_cache(maxsize=4096)
def is_memory(kind: Any, name: str) -> bool:
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
        #: The attributes that can't be copied.
        self._others = {name: value for name, value in vars(callback).items() if not _is_plain(value)}
        for name, value in _plain(type(callback), vars(callback)).items():
            payload = encode(value)
            if any(array.nbytes > _SMALL_BYTES for array in payload.arrays):
                self._values[name] = value
            else:
                self._values[name] = copy_value(value)
                self._texts[name] = _text(value)

    def find_uncopied(self, now: Mapping[str, Any]) -> list[str]:
        """Return the names of attributes that were set since and can't be copied, in order."""
        return sorted(
            name
            for name, value in now.items()
            if name not in _LEFT_OUT
            and name != _MONITOR_OP
            and (name not in self._others or self._others[name] is not value)
            and not _is_plain(value)
        )

    def find_unreadable(self) -> list[str]:
        """Return the names of attributes from before the fit that may have changed in place, nobody knows
        how."""
        return sorted(
            name for name, value in self._others.items() if name not in _LEFT_OUT and not can_read(value)
        )

    def find_changed(self, now: dict[str, Any]) -> dict[str, Any]:
        """Return those of the attributes that aren't as they were."""
        return {name: value for name, value in now.items() if not self._same(name, value)}

    def _same(self, name: str, value: Any) -> bool:
        if name in self._texts:
            return self._texts[name] == _text(value)
        return name in self._values and self._values[name] is value

    def restore(self, callback: Any) -> None:
        """Set all attributes back, but for those that hold something else than plain values by now."""
        now = _plain(type(callback), vars(callback))
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
        if name in (_MONITOR_OP, _UNCOPIED, _FILES, _OBJECTS):
            continue
        kind: Any = type(callback)
        if not is_memory(kind, name) or not _is_plain(vars(callback).get(name)):
            _LOG.warning(
                "A checkpoint would set %s.%s, which insitu never saves. It is left as it is",
                type(callback).__name__,
                name,
            )
            continue
        vars(callback)[name] = value
    for name, state in attributes.get(_OBJECTS, {}).items():
        if not write_object(vars(callback).get(name), state):
            _warn(callback, name, "another kind of object is there now")


def _warn(callback: Any, attribute: str, reason: str) -> None:
    name = f"{type(callback).__name__}.{attribute}"
    sys.stderr.write(f"[insitu] {name} can't be carried over from another process: {reason}\n")


def _is_plain(value: Any) -> bool:
    return bool(keep_serializable({"": value}))
