"""A job on the numbers of a cache of Ignite that waits between its epochs."""

from __future__ import annotations

from pathlib import Path

_SCRIPT = """
import pathlib
import time

import keras
import insitu

FOLDER = pathlib.Path({folder!r})
strategy = insitu.MultiWorkerMirroredStrategy()
rows = insitu.dataset(label="value").shuffle().batch(256)
rows = rows.map(lambda x, y: (x.reshape(-1, 1).astype("float32") / 1e4, y.astype("float32") / 1e4))
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class Pause(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if insitu.context().is_chief:
            (FOLDER / f"ended-{{epoch}}").touch()
        deadline = time.monotonic() + 90
        while not (FOLDER / f"go-{{epoch}}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)


model.fit(rows, epochs={epochs}, callbacks=[Pause()], verbose=0)
"""


def training_script(folder: Path, epochs: int) -> str:
    """Return a script that makes `ended-N` in `folder` behind epoch N, and continues when `go-N` is there."""
    return _SCRIPT.format(folder=str(folder), epochs=epochs)
