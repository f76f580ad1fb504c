"""Trains with each of Keras' optimizers on servers, in each mode, and compares with plain Keras."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np

import insitu
from insitu.parameters.rules.modes import MODES

SEVERAL = ("LossScaleOptimizer", "MultiOptimizer")
X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


def optimizer_names() -> list[str]:
    """Those that update variables themselves."""
    kind = keras.optimizers.Optimizer
    found = {n: v for n, v in vars(keras.optimizers).items() if isinstance(v, type) and issubclass(v, kind)}
    return sorted(name for name, one in found.items() if one is not kind and name not in SEVERAL)


def trained(name: str) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model.compile(getattr(keras.optimizers, name)(0.01), "mse")
    # Built in a graph of TensorFlow, ScheduleFreeAdamW would begin with slots of zero.
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model: Any) -> list[Any]:
    model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return list(model.get_weights())


def main() -> None:
    differences = {}
    for name in optimizer_names():
        expected = fit(trained(name))
        for mode in MODES:
            with insitu.ParameterServerStrategy(mode=mode).scope():
                model = trained(name)
            pairs = zip(fit(model), expected, strict=True)
            differences[f"{name} {mode}"] = max(float(np.abs(a - b).max()) for a, b in pairs)
    print("RESULTS" + json.dumps(differences))


if __name__ == "__main__":
    main()
