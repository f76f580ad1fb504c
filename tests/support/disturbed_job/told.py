"""A script with a callback that writes down at once what it hears, and what it is told of that."""

import os
from pathlib import Path

import keras

import insitu

OUT = Path(os.environ["OUT"])
OUT.mkdir(parents=True, exist_ok=True)
strategy = insitu.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)], name="model")
    model.compile("adam", "mse")


class Telling(keras.callbacks.Callback):
    """Counts elsewhere, and in the chief alone: what it has written stays, whatever happens."""

    def __init__(self):
        super().__init__()
        self.call = -1
        self.epoch = -1

    def tell(self, event):
        me = insitu.context()
        if me.is_chief:
            line = f"{self.call} {self.epoch} {event} {me.repeats_event}\n"
            file = os.open(OUT / "told", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, line.encode())
            os.close(file)

    def on_train_begin(self, logs=None):
        self.tell("train begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.tell("begin")

    def on_train_batch_begin(self, batch, logs=None):
        self.tell(f"batch {batch}")

    def on_train_batch_end(self, batch, logs=None):
        self.tell(f"batch end {batch}")

    def on_test_begin(self, logs=None):
        self.tell("test")

    def on_test_batch_end(self, batch, logs=None):
        self.tell(f"tested {batch}")

    def on_epoch_end(self, epoch, logs=None):
        self.tell("end")

    def on_train_end(self, logs=None):
        self.tell("train end")


telling = Telling()
train = insitu.dataset("rows").shuffle().batch(8).map(lambda batch: (batch["x"], batch["y"]))
held_out = insitu.dataset("rows").batch(16).map(lambda batch: (batch["x"], batch["y"]))
for call, do in enumerate(
    [
        lambda: model.fit(
            train,
            epochs=3,
            validation_data=held_out,
            verbose=0,
            callbacks=[telling, insitu.BackupAndRestore()],
        ),
        lambda: model.evaluate(held_out, verbose=0, callbacks=[telling]),
    ]
):
    telling.call, telling.epoch = call, -1
    do()
