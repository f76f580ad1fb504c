"""Plain values: what may travel between tasks or lie in a checkpoint. Nothing is ever unpickled.

A plain value is None, a bool, a number, a text, a NumPy array or scalar of numbers or text, or a list,
tuple or dict of plain values (keys: texts, numbers, tuples of them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DEPTH = 20


class NotPlain(TypeError):
    """The value holds something else."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A plain value taken apart: `tree` is JSON in which arrays are numbers, `arrays` are those."""

    tree: Any
    arrays: tuple[NDArray[Any], ...]

    @property
    def kinds(self) -> list[list[Any]]:
        """[name of the dtype, shape] of each array, as JSON."""
        return [[dtype_name(a.dtype), list(a.shape)] for a in self.arrays]


def pack(value: Any) -> Parcel:
    """Takes `value` apart. Arrays are not copied. Raises NotPlain."""
    arrays: list[NDArray[Any]] = []
    tree = _pack(value, arrays, 0)
    return Parcel(tree, tuple(arrays))


def _pack(value: Any, arrays: list[NDArray[Any]], depth: int) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > _DEPTH:
        raise NotPlain(f"A value is nested deeper than {_DEPTH} levels, or holds itself")
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        dtype_name(array.dtype)
        arrays.append(array)
        return {"scalar" if isinstance(value, np.generic) else "array": len(arrays) - 1}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack(item, arrays, depth + 1) for item in value]}
    if type(value) is dict:
        pairs = [[_pack(k, arrays, depth + 1), _pack(v, arrays, depth + 1)] for k, v in value.items()]
        return {"dict": pairs}
    raise NotPlain(f"A {type(value).__name__} is no plain value")


def unpack(tree: Any, arrays: Sequence[NDArray[Any]]) -> Any:
    """The value that `pack` took apart. Raises ValueError, KeyError or IndexError for another tree."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "array":
        return arrays[content]
    if kind == "scalar":
        return arrays[content][()]
    if kind == "dict":
        return {unpack(k, arrays): unpack(v, arrays) for k, v in content}
    items = [unpack(item, arrays) for item in content]
    return {"list": items, "tuple": tuple(items)}[kind]


def copied(value: Any) -> Any:
    """A copy that shares nothing with `value` that can change. Raises NotPlain."""
    parcel = pack(value)
    return unpack(parcel.tree, [array.copy() for array in parcel.arrays])


def plain_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are plain."""
    found = {}
    for name, value in values.items():
        try:
            pack(value)
        except NotPlain:
            continue
        found[name] = value
    return found


def dtype_name(dtype: np.dtype[Any]) -> str:
    """A name that `dtype_of` understands. Raises NotPlain for dtypes that hold objects or fields."""
    if dtype.kind in "biufcUSmM":
        return dtype.str
    if dtype.kind == "V" and dtype.names is None and dtype.type is not np.void:
        return dtype.name  # bfloat16 and the like, which NumPy doesn't know itself
    raise NotPlain(f"Arrays of dtype {dtype} are no plain values")


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of a name. Raises TypeError or AttributeError for one that isn't known."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
