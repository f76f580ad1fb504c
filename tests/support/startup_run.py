"""Sets up a backend, starts it, and prints what came of it as one line of JSON."""

from __future__ import annotations

import json
import sys
import warnings

import insitu

insitu.config.set_virtual_devices(2)
insitu.config.set_log_placement()

import keras  # noqa: E402
import numpy as np  # noqa: E402

from insitu.base.errors import InsituError  # noqa: E402
from insitu.train.devices.names import list_devices, resolve  # noqa: E402


def refused(*actions: object) -> list[str]:
    messages = []
    for action in actions:
        try:
            action()  # type: ignore[operator]
            messages.append("")
        except InsituError as error:
            messages.append(str(error))
    return messages


strategy = insitu.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="last")])
    model.compile("sgd", "mse")
model.fit(np.zeros((8, 4), "float32"), np.zeros((8, 2), "float32"), verbose=0)
with resolve("cpu:1").scope():
    placed = keras.Variable(np.zeros(2, "float32"))
messages = refused(lambda: insitu.config.set_virtual_devices(3), lambda: resolve("cpu:7"))
kept = insitu.config.settings().virtual_devices
insitu.config.set_soft_placement()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fallback = resolve("gpu:0").name
result = {
    "devices": [d.name for d in list_devices()],
    "placed": str(getattr(placed.value, "device", "")),
    "refused": messages,
    "kept": kept,
    "fallback": [fallback, *(str(w.message) for w in caught)],
}
sys.stdout.write(f"\nRESULTS{json.dumps(result)}\n")
