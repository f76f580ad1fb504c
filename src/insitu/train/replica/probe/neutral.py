"""Take chance out of a model while it is probed, and what couples the rows of a batch by design.

Each replica draws its own random numbers, and BatchNormalization takes the statistics of its own rows. So the
parts of a batch differ from the whole by these, which isn't what the probe looks for.
"""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from insitu.train.backends import active_backend

ops = keras.ops


class Chance:
    """`used` says whether anything asked for random numbers."""

    def __init__(self) -> None:
        self.used = False


@contextlib.contextmanager
def without_chance() -> Iterator[Chance]:
    """While open, random numbers of Keras and of the backend are their means, dropout keeps all, and
    BatchNormalization works as in inference. Afterwards all generators are as before."""
    chance = Chance()

    def neutral(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            chance.used = True
            return function(*arguments, **options)

        return call

    saved = (random.getstate(), np.random.get_state())
    patches = [(*patch, True) for patch in _random_functions()]
    patches.append((keras.layers.BatchNormalization, "call", _normalize, False))
    originals = [(place, name, getattr(place, name)) for place, name, _, _ in patches]
    try:
        for place, name, function, by_chance in patches:
            setattr(place, name, neutral(function) if by_chance else function)
        yield chance
    finally:
        for place, name, original in originals:
            setattr(place, name, original)
        random.setstate(saved[0])
        np.random.set_state(saved[1])


_call_normalization = keras.layers.BatchNormalization.call


def _normalize(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
    del training
    return _call_normalization(layer, inputs, training=False, mask=mask)


def _random_functions() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield (module, name, what to call instead)."""
    of_keras = importlib.import_module(f"keras.src.backend.{keras.backend.backend()}.random")
    yield from ((of_keras, name, function) for name, function in _OF_KERAS.items())
    yield from active_backend().random_functions(_OF_KERAS)


def _constant(shape: Any, value: Any, dtype: Any) -> Any:
    return ops.cast(ops.broadcast_to(value, shape), dtype or keras.config.floatx())


def _normal(
    shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None, **_: Any
) -> Any:
    return _constant(shape, mean, dtype)


def _uniform(
    shape: Any, minval: Any = 0.0, maxval: Any = None, dtype: Any = None, seed: Any = None, **_: Any
) -> Any:
    maxval = 1.0 if maxval is None else maxval
    return _constant(shape, minval + (maxval - minval) / 2, dtype)


def _randint(shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None) -> Any:
    return _constant(shape, (minval + maxval) // 2, dtype)


def _categorical(logits: Any, num_samples: int, dtype: Any = "int64", seed: Any = None) -> Any:
    return ops.zeros((ops.shape(logits)[0], num_samples), dtype)


_OF_KERAS: dict[str, Callable[..., Any]] = {
    "normal": _normal,
    "truncated_normal": _normal,
    "uniform": _uniform,
    "randint": _randint,
    "categorical": _categorical,
    "dropout": lambda inputs, rate, noise_shape=None, seed=None: inputs,
    "shuffle": lambda x, axis=0, seed=None: x,
    "gamma": lambda shape, alpha, dtype=None, seed=None: _constant(shape, alpha, dtype),
    "binomial": lambda shape, counts, probabilities, dtype=None, seed=None: _constant(
        shape, counts * probabilities, dtype
    ),
    "beta": lambda shape, alpha, beta, dtype=None, seed=None: _constant(shape, alpha / (alpha + beta), dtype),
}
