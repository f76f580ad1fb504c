"""Losses that divide by something else than the number of rows, trained plainly and over several shards.

Run as a script with KERAS_BACKEND, it prints the largest difference from plain Keras of each case as JSON.
With DEVICES=2 the shards are devices of one process.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

if "DEVICES" in os.environ:
    import insitu

    insitu.config.set_virtual_devices(int(os.environ["DEVICES"]))

import keras
import numpy as np
from models import in_shards, weights

import insitu

ops = keras.ops
ROWS, STEPS, BATCH = 21, 5, 8
"""Batches of 8, 8 and 5 rows, so that two shards, and three, have unequal numbers."""

rng = np.random.default_rng(0)
TOKENS = rng.integers(1, 6, (ROWS, STEPS))
for _row, _length in enumerate(rng.integers(1, STEPS + 1, ROWS)):
    TOKENS[_row, _length:] = 0
TOKENS[:3, 0] = 0  # rows without any entry that counts
TOKENS[:3, 1:] = 0
TAGS = (TOKENS % 3)[..., None].astype("float32")
CLASSES = rng.integers(0, 4, (ROWS, STEPS))
CLASSES[:9, 2:] = 3
WEIGHTS = rng.uniform(0.1, 3, ROWS).astype("float32")
STEP_WEIGHTS = rng.uniform(0.1, 3, (ROWS, STEPS)).astype("float32")
X = rng.normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def embedded() -> Any:
    return [
        keras.Input((STEPS,), dtype="int32"),
        keras.layers.Embedding(6, 4, mask_zero=True, embeddings_regularizer="l2"),
    ]


def tagger() -> Any:
    return keras.Sequential([*embedded(), keras.layers.Dense(1, kernel_regularizer="l2")])


def classifier() -> Any:
    hidden = keras.layers.Embedding(6, 4)
    return keras.Sequential([keras.Input((STEPS,), dtype="int32"), hidden, keras.layers.Dense(4)])


def recurrent() -> Any:
    layers = keras.layers
    rnn = layers.GRU(3, return_sequences=True)
    return keras.Sequential([*embedded(), rnn, layers.Dense(1)])


def two_outputs() -> Any:
    inputs = keras.Input((STEPS,), dtype="int32")
    masked = keras.layers.Embedding(6, 4, mask_zero=True)(inputs)
    tags = keras.layers.Dense(1, name="tags")(masked)
    whole = keras.layers.Dense(1, name="whole")(keras.layers.Flatten()(keras.layers.Embedding(6, 4)(inputs)))
    classes = keras.layers.Dense(4, name="classes")(masked)
    return keras.Model(inputs, {"tags": tags, "whole": whole, "classes": classes})


class Added(keras.layers.Layer):
    supports_masking = True

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def tagger_of_own_parts() -> Any:
    return keras.Sequential([*embedded(), Added(), keras.layers.Dense(1)])


def line() -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])


def wide_line() -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])


def flat_line() -> Any:
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(1)(inputs)[:, 0])


def one_number(y, p):
    return ops.mean(ops.square(y - p))


def contrast(y, p):
    """Rows with one label are to be near each other, and far from the others."""
    label = y[:, 0] > 0
    p = p / ops.sqrt(ops.sum(ops.square(p), -1, keepdims=True) + 1)
    near = ops.cast(label[:, None] == label[None], p.dtype)
    return -ops.mean(near * ops.log_softmax(p @ ops.transpose(p) / 0.3))


insitu.over_batch(contrast, rows="global")


class Towers(keras.Model):
    """Each row of one tower is to find its own of the other, among all rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one = keras.layers.Dense(3, kernel_regularizer="l2")
        self.other = keras.layers.Dense(3, use_bias=False)  # on which this loss wouldn't depend

    def build(self, shape):
        self.one.build(shape)
        self.other.build(shape)
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")
        self.built = True

    def call(self, x):
        return {"one": self.one(x), "other": self.other(ops.sin(x))}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        logits = self.temperature * y_pred["one"] @ ops.transpose(y_pred["other"])
        logits = logits - 0.1 * ops.abs(x[:, :1] - ops.transpose(x[:, 1:2]))
        own = ops.arange(ops.shape(logits)[0])
        loss = keras.losses.sparse_categorical_crossentropy(own, logits, from_logits=True)
        return ops.sum(loss * y[:, 0]) + ops.sum(ops.stack(self.losses))

    insitu.over_batch(compute_loss, rows="global")


def towers() -> Any:
    model = Towers()
    model.build((None, 4))
    return model


def over_all(loss: Any) -> Any:
    return insitu.over_batch(loss, rows="global")


def ignoring() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)


def mse(**options: Any) -> Any:
    return keras.losses.MeanSquaredError(**options)


Case = Callable[[], tuple[Any, Any, tuple[Any, ...]]]
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[Any, ...]]] = {
    "mask": (tagger, mse, (TOKENS, TAGS)),
    "mask behind a GRU": (recurrent, mse, (TOKENS, TAGS)),
    "mask and weights of steps": (tagger, mse, (TOKENS, TAGS, STEP_WEIGHTS)),
    "mask and a part of the user's own": (tagger_of_own_parts, mse, (TOKENS, TAGS)),
    "ignored class": (classifier, ignoring, (TOKENS, CLASSES)),
    "mean by weights": (line, lambda: mse(reduction="mean_with_sample_weight"), (X, Y, WEIGHTS)),
    "mean by weights and mask": (
        tagger,
        lambda: mse(reduction="mean_with_sample_weight"),
        (TOKENS, TAGS, STEP_WEIGHTS),
    ),
    "sum": (line, lambda: mse(reduction="sum"), (X, Y)),
    "sum with weights": (line, lambda: mse(reduction="sum"), (X, Y, WEIGHTS)),
    "sum with mask": (tagger, lambda: mse(reduction="sum"), (TOKENS, TAGS)),
    "one number": (line, lambda: one_number, (X, Y)),
    "one number with weights": (line, lambda: one_number, (X, Y, WEIGHTS)),
    "one number with mask": (tagger, lambda: one_number, (TOKENS, TAGS)),
    "global": (wide_line, lambda: contrast, (X, Y)),
    "global towers": (towers, lambda: None, (X, Y)),
    "global with mask and weights": (
        tagger,
        lambda: over_all(mse(reduction="mean_with_sample_weight")),
        (TOKENS, TAGS, STEP_WEIGHTS),
    ),
    "one of several outputs global": (
        two_outputs,
        lambda: {"tags": "mse", "whole": contrast, "classes": ignoring()},
        (TOKENS, {"tags": TAGS, "whole": Y, "classes": CLASSES}),
    ),
    "outputs without columns": (flat_line, lambda: "mse", (X, Y[:, 0], WEIGHTS)),
    "several outputs": (
        two_outputs,
        lambda: {"tags": "mse", "whole": "mae", "classes": ignoring()},
        (TOKENS, {"tags": TAGS, "whole": Y, "classes": CLASSES}),
    ),
}


def train(name: str, scope: Any, **compile_options: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(7)
    make, loss, data = CASES[name]
    y = {"y": data[1]} | ({"sample_weight": data[2]} if len(data) > 2 else {})
    with scope:
        model = make()
        rate = 0.002 if name.startswith("sum") else 0.05
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
        if name == "global towers":
            optimizer = keras.optimizers.Adam(0.01)
        model.compile(optimizer, loss(), **compile_options)
    history = model.fit(data[0], **y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(data[0], **y, batch_size=BATCH, verbose=0, return_dict=True)
    return {
        "weights": weights(model),
        "history": [value for _, values in sorted(history.items()) for value in values],
        "evaluated": [value for _, value in sorted(evaluated.items())],
    }


def over(shards: int) -> Any:
    """The scope of a strategy over so many shards of this process, or over its devices."""
    if "DEVICES" in os.environ:
        return insitu.MirroredStrategy().scope()
    context = in_shards(tuple(range(shards)), shards)
    return insitu.MultiWorkerMirroredStrategy(context=context).scope()


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference, relative to the largest number of its kind."""
    apart = [0.0]
    for name in theirs:
        for a, b in zip(mine[name], theirs[name], strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.isfinite(a).all() and np.isfinite(b).all(), (name, a, b)
            apart.append(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)))
    return max(apart)


def compare(name: str, shards: int, **compile_options: Any) -> float:
    plain = train(name, contextlib.nullcontext(), **compile_options)
    return difference(train(name, over(shards), **compile_options), plain)


def main() -> None:
    results: dict[str, Any] = {}
    import sys

    for name in sys.argv[1:] or CASES:
        try:
            results[name] = compare(name, 2)
        except Exception as error:
            results[name] = str(error)
    print("RESULTS" + json.dumps(results))


if __name__ == "__main__":
    main()
