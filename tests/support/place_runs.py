"""Trains with layers on three virtual devices of the backend of KERAS_BACKEND, and prints what came out as
one line of JSON.

python place_runs.py           an optimizer with all that it may do, a last batch of one row
python place_runs.py short     a plain one, whole batches: on JAX each operation for each shape is a program
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import keras
import numpy as np

import insitu

SHORT = sys.argv[1:] == ["short"]
ROWS = 32 if SHORT else 49
PLACES = {"conv": "cpu:1", "norm": "cpu:1", "drop": "cpu:1", "block": "cpu:2"}


def build() -> Any:
    """Several inputs, a layer with random state, one with state of its own, a block of layers."""
    layers, start = keras.layers, keras.initializers.GlorotUniform
    image, words = keras.Input((8, 8, 1)), keras.Input((3,), dtype="int32")
    # Without a bias: in front of BatchNorm its gradient is nothing but rounding, which Adam makes large.
    x = layers.Conv2D(
        4, 3, use_bias=False, kernel_initializer=start(1), kernel_regularizer="l2", name="conv"
    )(image)
    x = layers.Dropout(0.3, seed=5, name="drop")(layers.BatchNormalization(name="norm")(x))
    embed = layers.Embedding(12, 4, embeddings_initializer=start(2))
    block = keras.Sequential(
        [embed, layers.Flatten(), layers.Dense(8, kernel_initializer=start(3))], name="block"
    )
    x = layers.Concatenate()([layers.Flatten()(x), block(words)])
    model = keras.Model([image, words], layers.Dense(2, kernel_initializer=start(4))(x))
    optimizer = keras.optimizers.AdamW(1e-2, global_clipnorm=1.0, use_ema=True, name="optimizer")
    if SHORT:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, name="optimizer")
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(scope: Any) -> tuple[dict[str, Any], Any]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(ROWS, 8, 8, 1)).astype("float32"), rng.integers(0, 12, (ROWS, 3))]
    y = rng.integers(0, 2, ROWS)
    with scope:
        model = build()
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {
        "history": history,
        "evaluate": model.evaluate(x, y, batch_size=16, verbose=0),
        "predict": model.predict(x, batch_size=16, verbose=0).ravel().tolist(),
        "weights": [w.ravel().tolist() for w in model.get_weights()],
    }, model


def device_of(variable: Any) -> str:
    value = variable.value
    if keras.backend.backend() == "jax":
        (device,) = value.devices()
        return f"cpu:{device.id}"
    return str(value.device).rpartition("device:")[2].lower()


def refused(act: Any) -> str:
    try:
        act()
    except insitu.errors.InsituError as error:
        return str(error)
    return "nothing"


def placed_on(places: Any) -> Any:
    strategy = insitu.ModelParallelStrategy()
    strategy.place(places)
    return strategy.scope()


def made_before() -> None:
    model = build()
    with placed_on(PLACES):
        model.compile("sgd", "mse")
    model.fit([np.ones((1, 8, 8, 1)), np.ones((1, 3))], np.ones((1, 2)), verbose=0)


def without_plan() -> None:
    with insitu.ModelParallelStrategy().scope():
        model = build()
    model.fit([np.ones((16, 8, 8, 1)), np.ones((16, 3))], np.ones(16), batch_size=16, verbose=0)


def main() -> dict[str, Any]:
    if keras.backend.backend() == "jax":
        import jax

        # Small programs, many of them: what they do is compiled fast.
        jax.config.update("jax_disable_most_optimizations", True)
    insitu.config.set_virtual_devices(3)
    plain, _ = train(contextlib.nullcontext())
    placed, model = train(placed_on(PLACES))
    variables = [*model.weights, *model.optimizer.variables]
    return {
        "plain": plain,
        "placed": placed,
        "devices": {variable.path: device_of(variable) for variable in variables},
        "unknown layer": refused(lambda: train(placed_on({"nothing": "cpu:1"}))),
        "unknown device": refused(lambda: placed_on({"conv": "cpu:7"})),
        "no plan": refused(without_plan),
        "made before": refused(made_before),
    }


if __name__ == "__main__":
    print("RESULTS", json.dumps(main()))
