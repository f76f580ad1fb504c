"""Runs feature columns on the backend of KERAS_BACKEND and prints what came out as one line of JSON.

python feature_runs.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
from feature_rows import WORDS, make_columns, make_rows, table_of

import insitu
from insitu import feature_column as fc


def main(folder: Path) -> None:
    keras.utils.set_random_seed(7)
    vocabulary = folder / "words.txt"
    vocabulary.write_text("\n".join(WORDS[1:8]) + "\n")
    columns = make_columns(fc, str(vocabulary))
    rows = make_rows()
    layer = fc.DenseFeatures(columns)
    layer.build()
    for weight in layer.weights:
        weight.assign(table_of(weight.shape))
    matrix = np.asarray(keras.ops.convert_to_numpy(layer(rows)))

    inputs = layer.transform(rows)
    labels = (rows["age"] > 40).astype("float32")
    with insitu.OneDeviceStrategy("cpu:0").scope():
        keras.utils.set_random_seed(7)
        model = keras.Sequential([fc.DenseFeatures(columns), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    losses = model.fit(inputs, labels, batch_size=32, epochs=3, shuffle=False, verbose=0).history["loss"]
    functional_inputs = fc.make_inputs(columns)
    functional = keras.Model(functional_inputs, model.layers[1](model.layers[0](functional_inputs)))
    path = folder / "model.keras"
    functional.save(path)
    again = keras.saving.load_model(path)
    predicted = functional.predict(inputs, verbose=0)
    results = {
        "matrix": matrix.tolist(),
        "losses": losses,
        "same_when_loaded": bool(np.array_equal(predicted, again.predict(inputs, verbose=0))),
        "same_in_both": bool(np.allclose(predicted, model.predict(inputs, verbose=0))),
    }
    print("RESULTS" + json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
