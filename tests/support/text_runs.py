"""Trains on a column of text on the backend of KERAS_BACKEND, and prints what came out as one line of JSON.

python text_runs.py FOLDER    # of a file people.parquet with city, age, label
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import insitu
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.grid import import_cache

NAMES = ["age", "city"]


def make_model(layer: Any, strategy: Any) -> Any:
    """A model over `age`, and `city` as ids; the text itself if a layer makes ids of it."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        kind = "string" if layer else "int64"
        inputs = [keras.Input((1,), name="age"), keras.Input((1,), name="city", dtype=kind)]
        ids = layer(inputs[1]) if layer else inputs[1]
        city = keras.layers.Flatten()(keras.layers.Embedding(8, 3)(ids))
        hidden = keras.layers.concatenate([inputs[0], city])
        model = keras.Model(dict(zip(NAMES, inputs, strict=True)), keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def fit(model: Any, data: Any) -> list[float]:
    data = data.map(lambda x, y: ({name: value[:, None] for name, value in x.items()}, y))
    losses: list[float] = model.fit(data.shuffle(1).batch(32), epochs=2, verbose=0).history["loss"]
    return losses


def main(folder: Path) -> None:
    import_cache(Paths.default(), "people", [str(folder / "people.parquet")], partitions=4)
    data = insitu.dataset("people")
    ids = data.lookup("city")
    results: dict[str, Any] = {"vocabulary": ids.vocabulary("city")}
    for name, made in (("lookup", ids), ("hash", data.hash("city", bins=8))):
        results[name] = fit(make_model(None, insitu.MultiWorkerMirroredStrategy()), made)
    if keras.backend.backend() == "tensorflow":
        for name, layer in (("lookup", keras.layers.StringLookup()), ("hash", keras.layers.Hashing(8))):
            if name == "lookup":
                insitu.adapt({"city": layer}, data)
            results[f"{name} of Keras"] = fit(make_model(layer, insitu.MultiWorkerMirroredStrategy()), data)
    else:
        plain = keras.Sequential([keras.layers.Dense(1)])
        plain.compile("sgd", "mse")
        for model in (make_model(None, insitu.MultiWorkerMirroredStrategy()), plain):
            try:
                model.fit(data.batch(32), verbose=0)
            except InputError as error:
                results.setdefault("refused", []).append(str(error))
    assert all(np.isfinite(v).all() for k, v in results.items() if "lookup" in k or "hash" in k)
    print("RESULTS" + json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
