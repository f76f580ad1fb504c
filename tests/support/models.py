"""Models and data that show what a strategy may get wrong."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from insitu.context import Context, context


def in_shards(shards: tuple[int, ...], num_shards: int) -> Context:
    here = context()
    return Context(paths=here.paths, shards=shards, num_shards=num_shards)


def image_rows() -> tuple[np.ndarray, np.ndarray]:
    """203 small images of two classes: not divisible by a batch, nor by two shards."""
    x = np.random.default_rng(0).normal(size=(203, 8, 8, 1)).astype("float32")
    return x, (x.mean((1, 2, 3)) > 0).astype("int64")


def image_model(*, batch_norm: bool = True, dropout: float = 0.3, **compile_options: Any) -> Any:
    """A convolution, BatchNorm and Dropout, compiled."""
    layers = keras.layers
    stack = [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu", kernel_initializer=_start(1))]
    if batch_norm:
        stack.append(layers.BatchNormalization())
    stack.append(layers.Flatten())
    if dropout:
        stack.append(layers.Dropout(dropout, seed=5))
    stack.append(layers.Dense(2, kernel_initializer=_start(2)))
    model = keras.Sequential(stack)
    options: dict[str, Any] = {
        "optimizer": keras.optimizers.Adam(1e-2),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(1, name="top")],
    }
    model.compile(**{**options, **compile_options})
    return model


def _start(seed: int) -> Any:
    return keras.initializers.GlorotUniform(seed)


def weights(model: Any) -> list[np.ndarray]:
    return [np.array(w) for w in model.get_weights()]


def same_bits(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True)
    )
