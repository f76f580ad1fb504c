"""A script that gives callbacks to `evaluate` and `predict`, too. It knows nothing of faults."""

import json
import os
import random
from pathlib import Path

import keras
import numpy as np

import insitu

OUT = Path(os.environ["OUT"])
OUT.mkdir(parents=True, exist_ok=True)
me = insitu.context()
strategy = insitu.MultiWorkerMirroredStrategy()
random.seed(1)
np.random.seed(1)

with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, name="out")], name="model")
    model.compile("adam", "mse", metrics=["mae"])


class Counting(keras.callbacks.Callback):
    """Remembers what it has heard in each task, over several calls."""

    def __init__(self):
        super().__init__()
        self.heard = []
        self.mean = keras.metrics.Mean()

    def note(self, event, number=None):
        drawn = random.random() + float(np.random.random())
        self.heard.append((event, number, drawn))
        if number is not None:
            self.mean.update_state(number)

    def on_epoch_end(self, epoch, logs=None):
        self.note(f"epoch {epoch}", float(logs["loss"]))

    def on_test_begin(self, logs=None):
        self.note("test begin")

    def on_test_batch_begin(self, batch, logs=None):
        self.note(f"test {batch}")

    def on_test_batch_end(self, batch, logs=None):
        self.note(f"tested {batch}", float(logs["loss"]))

    def on_test_end(self, logs=None):
        self.note("test end", float(logs["mae"]))

    def on_predict_begin(self, logs=None):
        self.note("predict begin")

    def on_predict_batch_begin(self, batch, logs=None):
        self.note(f"predict {batch}")

    def on_predict_batch_end(self, batch, logs=None):
        self.note(f"predicted {batch}", float(np.sum(logs["outputs"])))

    def on_predict_end(self, logs=None):
        self.note("predict end")


class OfTheChief(keras.callbacks.Callback):
    """Counts in the chief alone, and appends to a file as a call ends."""

    def __init__(self):
        super().__init__()
        self.batches = 0
        self.lines = []

    def count(self, batch, logs=None):
        if me.is_chief:
            self.batches += 1

    on_test_batch_end = on_predict_batch_end = count

    def write(self, logs=None):
        if me.is_chief:
            self.lines.append(self.batches)
            (OUT / "lines.json").write_text(json.dumps(self.lines))

    on_test_end = on_predict_end = write


class Ending(keras.callbacks.Callback):
    """Ends a call before its last step, as the step begins."""

    def on_test_batch_begin(self, batch, logs=None):
        self.model.stop_evaluating = batch == 1

    def on_predict_batch_begin(self, batch, logs=None):
        self.model.stop_predicting = batch == 1


train = insitu.dataset("rows").shuffle().batch(16).map(lambda batch: (batch["x"], batch["y"]))
held_out = insitu.dataset("rows").batch(8).map(lambda batch: (batch["x"], batch["y"]))
counting, chiefs = Counting(), OfTheChief()
both = [counting, chiefs]
board = keras.callbacks.TensorBoard(str(OUT / "board"))
drawn = []


def do(call, *args, **kwargs):
    result = call(*args, verbose=2, **kwargs)
    drawn.append(random.random() + float(np.random.random()))
    return result


model.fit(train, epochs=1, verbose=0, callbacks=[counting])
result = {
    "first": do(model.evaluate, held_out, callbacks=[*both, board]),
    "second": do(model.predict, held_out, callbacks=both).tolist(),
    "third": do(model.evaluate, held_out, callbacks=[*both, Ending()]),
    "fourth": do(model.predict, held_out, callbacks=[*both, Ending()]).tolist(),
}
model.fit(train, epochs=1, verbose=0, callbacks=[counting])
result.update(heard=counting.heard, mean=float(counting.mean.result()), drawn=drawn)
result["weights"] = [np.asarray(w).tolist() for w in model.get_weights()]
(OUT / f"result-{me.task}.json").write_text(json.dumps(result))
