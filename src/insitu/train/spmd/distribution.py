"""Switch `keras.distribution` off for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras


@contextlib.contextmanager
def without_distribution() -> Iterator[None]:
    """While open, no `keras.distribution` is set: Keras would shard batches too. Also a decorator."""
    outer = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(outer)
