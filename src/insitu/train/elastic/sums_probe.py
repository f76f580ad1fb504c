"""Finds hosts whose backends round differently: other processors, other compiled kernels, other libraries.

Replicas stay equal only where the same operations on the same numbers give the same bits. Each task of a job
on several hosts does a few small ones when it joins, and compares a hash of the results with those of others.
It is no proof: other operations, or other sizes, may still differ. For that replicas are compared at times.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from insitu.context import ALLOW_MIXED_ENV
from insitu.errors import MixedProcessors
from insitu.exchange import parse_address


@functools.cache
def probe_sums() -> str:
    """Return a hash of 16 hex digits over what the backend computes of fixed numbers, in float32.

    The sizes are no multiples of vectors, so that sums are taken in the order of the kernels here.
    """
    # Without a generator, whose own kernels may differ: exact in float32, and of different sizes.
    numbers = ((np.arange(70_003, dtype=np.int64) * 7919) % 10_007 - 5003).astype(np.float32) / 4099
    shapes = ((67, 513), (513, 37), (2, 19, 19, 5), (3, 3, 5, 11), numbers.shape)
    given = [numbers[: math.prod(shape)].reshape(shape) for shape in shapes]
    found = hashlib.sha256()
    for result in _run(given):
        found.update(np.ascontiguousarray(keras.ops.convert_to_numpy(result)).tobytes())
    return found.hexdigest()[:16]


def _compute(left: Any, right: Any, image: Any, kernel: Any, long: Any) -> tuple[Any, ...]:
    """Return what is compared."""
    ops = keras.ops
    return (
        ops.matmul(left, right),
        ops.conv(image, kernel, padding="same", data_format="channels_last"),
        ops.sum(long),
        ops.exp(long),
        ops.tanh(long),
    )


def _run(given: Sequence[np.ndarray[Any, Any]]) -> tuple[Any, ...]:
    """Return what is compared. JAX compiles it as a whole: that takes less time than each operation alone."""
    if keras.backend.backend() != "jax":
        return _compute(*map(keras.ops.convert_to_tensor, given))
    import jax

    # A function of its own: what was compiled before isn't taken.
    compiled: Callable[..., tuple[Any, ...]] = jax.jit(lambda *arrays: _compute(*arrays))
    return compiled(*given)


def describe_sums(addresses: Sequence[str], node: str) -> dict[str, str]:
    """Return what a task says of its sums to those at `addresses`; nothing where all are on one host, or
    hosts may differ."""
    if os.environ.get(ALLOW_MIXED_ENV) == "1" or len({parse_address(each)[0] for each in addresses}) < 2:
        return {}
    return {"sums": probe_sums(), "node": node}


def check_same_sums(notes: Sequence[Mapping[str, Any]]) -> None:
    """Raise MixedProcessors where tasks, which have written these notes, differ in their sums."""
    nodes: dict[str, list[str]] = {}
    for note in notes:
        if "sums" in note:
            nodes.setdefault(str(note["sums"]), []).append(str(note["node"]))
    if len(nodes) > 1:
        listed = "; ".join(f"{', '.join(sorted(set(those)))}: {sums}" for sums, those in nodes.items())
        raise MixedProcessors(
            "The backend must give the same bits on all hosts of a job, or replicas wouldn't stay equal. "
            f"Received: other hashes of the same small sums; {listed}. `insitu nodes` shows the processors. "
            "Use hosts of one kind, with the same libraries, or start with --allow-mixed-processors"
        )
