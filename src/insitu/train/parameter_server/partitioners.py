"""Say how many pieces a variable has on the servers, as `tf.distribute.experimental.partitioners` do.

A partitioner is called with a variable's shape and dtype and returns the number of pieces along each axis.
Pieces are rows of the first axis, as even as they can be; all other axes have one. Each piece is on one
server, with its part of the optimizer's state. The pieces of all variables go to the servers with the fewest
bytes, the largest first, so a server may hold several pieces of a variable if there are more than servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from insitu.base.errors import InputError
from insitu.parameters.rules import as_dtype
from insitu.train.backends import active_backend

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner:
    """Base of partitioners."""

    def __call__(self, shape: Any, dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of pieces along each axis of `shape`."""
        raise NotImplementedError


class FixedShardsPartitioner(Partitioner):
    """Cuts each variable into `num_shards` pieces, or as many as it has rows."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _check_positive("num_shards", num_shards)

    def __call__(self, shape: Any, dtype: Any, axis: int = 0) -> list[int]:
        sizes = _sizes(shape)
        return _along(axis, sizes, min(self._num_shards, sizes[axis]))


class MinSizePartitioner(Partitioner):
    """Cuts a variable into as many pieces as there are beginnings of `min_shard_bytes`, `max_shards` at most.

    As in TensorFlow, a number of bytes that doesn't divide is rounded up, so that pieces may be a little
    smaller.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        self._min_shard_bytes = _check_positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _check_positive("max_shards", max_shards)
        self._bytes_per_string = _check_positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Any, dtype: Any, axis: int = 0) -> list[int]:
        sizes = _sizes(shape)
        size = math.prod(sizes) * _element_bytes(dtype, self._bytes_per_string)
        pieces = math.ceil(size / self._min_shard_bytes)
        return _along(axis, sizes, max(1, min(sizes[axis], self._max_shards, pieces)))


class MaxSizePartitioner(Partitioner):
    """Cuts a variable into as few pieces as possible of up to `max_shard_bytes`.

    A row isn't cut, and `max_shards` isn't exceeded, so pieces may be larger.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        self._max_shard_bytes = _check_positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = _check_positive("max_shards", max_shards) if max_shards else None
        self._bytes_per_string = _check_positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Any, dtype: Any, axis: int = 0) -> list[int]:
        sizes = _sizes(shape)
        if not math.prod(sizes):
            return _along(axis, sizes, 1)
        row_bytes = math.prod(sizes) / sizes[axis] * _element_bytes(dtype, self._bytes_per_string)
        pieces = math.ceil(sizes[axis] / max(1, math.floor(self._max_shard_bytes / row_bytes)))
        return _along(axis, sizes, min(self._max_shards or pieces, pieces))


def check_partitioner(given: Any) -> None:
    """Raise InputError unless `given` can be a variable_partitioner."""
    if given is not None and not callable(given):
        raise InputError(
            "variable_partitioner is a function of a variable's shape and dtype. Received: "
            f"{given!r}. Pass such as insitu.experimental.partitioners.MinSizePartitioner(max_shards=2)."
        )


def count_parts(partitioner: Callable[..., Sequence[int]], shape: Sequence[int], dtype: Any) -> int:
    """Return how many pieces `partitioner` cuts a variable into. Scalars aren't cut.

    Raises InputError for an answer that isn't a number of pieces along the first axis.
    """
    if not shape:
        return 1
    spec = active_backend().make_spec(tuple(shape), keras.backend.standardize_dtype(dtype))
    answer = partitioner(shape=spec.shape, dtype=spec.dtype)
    parts = [int(n) for n in answer or ()]
    if len(parts) != len(shape) or parts[0] < 1 or any(n != 1 for n in parts[1:]):
        raise InputError(
            "A variable_partitioner returns the number of pieces along each axis: at least 1 for the first, "
            f"1 for the others. Received: {answer!r} for the shape {tuple(shape)}. Return such as "
            f"{[2, *[1] * (len(shape) - 1)]}."
        )
    return parts[0]


def _sizes(shape: Any) -> list[int]:
    return [int(size) for size in shape]


def _along(axis: int, sizes: Sequence[int], pieces: int) -> list[int]:
    result = [1] * len(sizes)
    result[axis] = pieces
    return result


def _element_bytes(dtype: Any, bytes_per_string: int) -> int:
    name = str(getattr(dtype, "name", None) or dtype)
    if name in ("string", "str", "object"):
        return bytes_per_string
    return int(as_dtype(name).itemsize if name == "bfloat16" else np.dtype(name).itemsize)


def _check_positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a whole number, at least 1. Received: {value!r}.")
    return value
