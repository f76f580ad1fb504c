"""A trial: trains with the hyper-parameters of its arguments, and writes its logs to history.csv.

insitu start --workers 2 - examples/search/job train.py --rate 0.01 --units 16
"""

import argparse

import keras
import numpy as np

import insitu

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.01)
parser.add_argument("--units", type=int, default=16)
parser.add_argument("--epochs", type=int, default=8)
chosen = parser.parse_args()

rng = np.random.default_rng(0)
x = rng.normal(size=(2000, 2)).astype("float32")
y = (np.hypot(x[:, 0], x[:, 1]) > 1.2).astype("int32")  # within a circle, or outside

keras.utils.set_random_seed(1)
with insitu.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(chosen.units, activation="relu"),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(chosen.rate), loss, metrics=["accuracy"])

callbacks = [insitu.BackupAndRestore(), keras.callbacks.CSVLogger("history.csv")]
model.fit(
    x[:1600],
    y[:1600],
    batch_size=64,
    epochs=chosen.epochs,
    validation_data=(x[1600:], y[1600:]),
    verbose=2,
    callbacks=callbacks,
)
