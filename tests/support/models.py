"""Models and data that show what a strategy may get wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from insitu.base.context import Context, context
from insitu.train.replica.state import to_numpy


def in_shards(shards: tuple[int, ...], num_shards: int) -> Context:
    here = context()
    return Context(paths=here.paths, shards=shards, num_shards=num_shards)


def image_rows() -> tuple[np.ndarray, np.ndarray]:
    """203 small images of two classes: not divisible by a batch, nor by two shards."""
    x = np.random.default_rng(0).normal(size=(203, 8, 8, 1)).astype("float32")
    return x, (x.mean((1, 2, 3)) > 0).astype("int64")


class Batches(keras.utils.PyDataset):
    """`image_rows` as 7 batches of 29 rows."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return tuple(values[29 * index : 29 * index + 29] for values in image_rows())


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


def mixed_precision(scope: Callable[[], Any], policy: str) -> dict[str, Any]:
    """Three steps in half precision, over two shards at most: in the second a row of the first shard is too
    large for float16, so that an optimizer that scales losses must leave that step out, on all shards."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(48, 6)).astype("float32"), rng.normal(size=(48, 2)).astype("float32")
    x[16] = 1e6
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        with scope():
            hidden = keras.layers.Dense(5, activation="tanh", kernel_initializer=_start(1))
            model = keras.Sequential([keras.Input((6,)), hidden])
            model.add(keras.layers.Dense(2, kernel_initializer=_start(2), dtype="float32"))
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    finally:
        keras.config.set_dtype_policy(before)
    optimizer = model.optimizer
    scale = getattr(optimizer, "dynamic_scale", None)
    return {
        "weights": [value.tolist() for value in weights(model)],
        "iterations": int(to_numpy(getattr(optimizer, "inner_optimizer", optimizer).iterations)),
        "scale": None if scale is None else float(to_numpy(scale)),
    }


def check_mixed_precision(runs: Sequence[dict[str, Any]]) -> None:
    """`runs` are what `mixed_precision` gave plain, with one shard and with two."""
    plain, *others = runs
    for other in others:
        assert (other["iterations"], other["scale"]) == (plain["iterations"], plain["scale"])
        for mine, theirs in zip(other["weights"], plain["weights"], strict=True):
            assert np.isfinite(mine).all()
            np.testing.assert_allclose(mine, theirs, rtol=2e-2, atol=2e-3)


def weights(model: Any) -> list[np.ndarray]:
    return [np.array(w) for w in model.get_weights()]


def same_bits(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True)
    )
