"""Finds hosts whose backends round differently: other processors, other compiled kernels, other libraries.

Replicas stay equal only where the same operations on the same numbers give the same bits. Each task of a job
on several hosts does a few small ones when it joins, and compares a hash of the results with those of others.
It is no proof: other operations, or other sizes, may still differ. For that replicas are compared at times.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
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
    ops = keras.ops
    # Without a generator, whose own kernels may differ: exact in float32, and of different sizes.
    numbers = ((np.arange(70_003, dtype=np.int64) * 7919) % 10_007 - 5003).astype(np.float32) / 4099
    left = ops.convert_to_tensor(numbers[: 67 * 513].reshape(67, 513))
    right = ops.convert_to_tensor(numbers[: 513 * 37].reshape(513, 37))
    image = ops.convert_to_tensor(numbers[: 2 * 19 * 19 * 5].reshape(2, 19, 19, 5))
    kernel = ops.convert_to_tensor(numbers[: 3 * 3 * 5 * 11].reshape(3, 3, 5, 11))
    long = ops.convert_to_tensor(numbers)
    results = (
        ops.matmul(left, right),
        ops.conv(image, kernel, padding="same", data_format="channels_last"),
        ops.sum(long),
        ops.exp(long),
        ops.tanh(long),
    )
    found = hashlib.sha256()
    for result in results:
        found.update(np.ascontiguousarray(keras.ops.convert_to_numpy(result)).tobytes())
    return found.hexdigest()[:16]


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
