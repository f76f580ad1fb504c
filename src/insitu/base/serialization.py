"""Encode values that travel between tasks or are in checkpoints, as JSON and arrays. Nothing is unpickled.

A serializable value is None, a bool, a number, a string, bytes, a NumPy array or scalar of numbers or
strings, or a list, tuple, set, frozenset, dict, or a deque, Counter, OrderedDict or defaultdict of Python's,
of serializable values. Keys of dicts are strings, numbers or tuples of them.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_DEPTH = 20
_SETS = {"set": set, "frozenset": frozenset}
_DICTS = {"dict": dict, "counter": Counter, "ordered": OrderedDict}
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple)}
"""Those of a defaultdict."""
_PACKED_FROM = 16
"""Numbers in a list from which on they are packed into an array: such as a History's, one for each epoch."""
_PACKED_TYPES: dict[type, tuple[str, type]] = {float: ("floats", np.float64), int: ("ints", np.int64)}
"""By the type of all numbers of a list: the kind of the packed list, and the dtype that holds them."""
_LENGTH_BYTES = 8
"""Size of the number that `to_bytes` puts first: the length of the JSON header."""


class NotSerializable(TypeError):
    """Raised for a value that holds something else than this module's docstring names."""


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded value."""

    tree: Any
    """The value's structure as JSON, with a number in place of each array."""
    arrays: tuple[NDArray[Any], ...]
    """The arrays, by the numbers in `tree`."""

    @property
    def specs(self) -> list[list[Any]]:
        """[name of the dtype, shape] of each array, as JSON."""
        return [[format_dtype(a.dtype), list(a.shape)] for a in self.arrays]


def encode(value: Any) -> Payload:
    """Separate the arrays of `value` from its structure. Copies no array. Raises NotSerializable."""
    arrays: list[NDArray[Any]] = []
    tree = _encode(value, arrays, 0)
    return Payload(tree, tuple(arrays))


def _encode(value: Any, arrays: list[NDArray[Any]], depth: int) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > _MAX_DEPTH:
        raise NotSerializable(f"A value is nested deeper than {_MAX_DEPTH} levels, or contains itself")
    if isinstance(value, np.ma.MaskedArray):
        raise NotSerializable("Masked arrays can't be serialized: their masks would be lost")
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        format_dtype(array.dtype)
        arrays.append(array)
        return {"scalar" if isinstance(value, np.generic) else "array": len(arrays) - 1}
    if type(value) is list and (packed := _pack(value, arrays)) is not None:
        return packed
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encode(item, arrays, depth + 1) for item in value]}
    if isinstance(value, dict):
        pairs = [[_encode(k, arrays, depth + 1), _encode(v, arrays, depth + 1)] for k, v in value.items()]
        return _encode_dict(value, pairs)
    if type(value) in _SETS.values():
        # In an order that is the same in all processes.
        items = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
        return {type(value).__name__: [_encode(item, arrays, depth + 1) for item in items]}
    if type(value) is deque:
        return {"deque": [value.maxlen, *(_encode(item, arrays, depth + 1) for item in value)]}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise NotSerializable(f"Values of type {type(value).__name__} can't be serialized")


def _encode_dict(value: dict[Any, Any], pairs: list[Any]) -> Any:
    names = [name for name, kind in _DICTS.items() if type(value) is kind]
    if names:
        return {names[0]: pairs}
    made: Any = getattr(value, "default_factory", None)
    if type(value) is defaultdict and made in _FACTORIES.values():
        return {"default": [made.__name__, *pairs]}
    raise NotSerializable(f"Values of type {type(value).__name__} can't be serialized")


def _pack(value: list[Any], arrays: list[NDArray[Any]]) -> Any:
    """Return a long list of numbers of one type as an array, so that the tree stays short; None: another."""
    types = set(map(type, value)) if len(value) >= _PACKED_FROM else set()
    if len(types) != 1 or (found := _PACKED_TYPES.get(types.pop())) is None:
        return None
    kind, dtype = found
    try:
        arrays.append(np.array(value, dtype))
    except OverflowError:
        return None
    return {kind: len(arrays) - 1}


def decode(tree: Any, arrays: Sequence[NDArray[Any]]) -> Any:
    """Return the value that `encode` was given. Raises ValueError, KeyError or IndexError for a `tree` that
    `encode` doesn't make."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "array":
        return arrays[content]
    if kind == "scalar":
        return arrays[content][()]
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in _DICTS:
        return _DICTS[kind]({decode(k, arrays): decode(v, arrays) for k, v in content})
    if kind == "default":
        factory, *pairs = content
        return defaultdict(_FACTORIES[factory], {decode(k, arrays): decode(v, arrays) for k, v in pairs})
    if kind == "deque":
        maxlen, *items = content
        return deque((decode(item, arrays) for item in items), maxlen)
    if kind in ("floats", "ints"):
        return arrays[content].tolist()
    items = [decode(item, arrays) for item in content]
    return {"list": list, "tuple": tuple, **_SETS}[kind](items)


def to_bytes(value: Any) -> bytes:
    """Return `value` as one string of bytes. Raises NotSerializable."""
    payload = encode(value)
    header = json.dumps([payload.tree, payload.specs]).encode()
    parts = [np.ascontiguousarray(array).tobytes() for array in payload.arrays]
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *parts])


def from_bytes(data: bytes) -> Any:
    """Return the value that `to_bytes` was given. Its arrays are read-only views of `data`."""
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    tree, specs = json.loads(data[_LENGTH_BYTES:start])
    arrays = []
    for name, shape in specs:
        dtype, count = parse_dtype(name), prod(shape)
        arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return decode(tree, arrays)


def copy_value(value: Any) -> Any:
    """Return a copy that shares no mutable part with `value`. Raises NotSerializable."""
    payload = encode(value)
    return decode(payload.tree, [array.copy() for array in payload.arrays])


def keep_serializable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `values` that can be encoded."""
    found = {}
    for name, value in values.items():
        try:
            encode(value)
        except NotSerializable:
            continue
        found[name] = value
    return found


def format_dtype(dtype: np.dtype[Any]) -> str:
    """Return a name that `parse_dtype` reads. Raises NotSerializable for dtypes that hold objects or
    fields."""
    if dtype.kind in "biufcUSmM":
        return dtype.str
    if dtype.kind == "V" and dtype.names is None and dtype.type is not np.void:
        return dtype.name  # bfloat16 and the like, which NumPy doesn't know itself
    raise NotSerializable(f"Arrays of dtype {dtype} can't be serialized")


def parse_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name. Raises TypeError or AttributeError for an unknown one."""
    try:
        return np.dtype(name)
    except (TypeError, SyntaxError):
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
