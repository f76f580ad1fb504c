"""train.py WAY EPOCHS: a small training whose weights say whether anything has disturbed it."""

import hashlib
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

import insitu

WAYS = {
    "exchange": lambda: insitu.MultiWorkerMirroredStrategy(),
    "xla": lambda: insitu.MultiWorkerMirroredStrategy(communication="xla"),
    "devices": lambda: insitu.MirroredStrategy(),
}
faults = Path(os.environ["INSITU_CHAOS"]) if "INSITU_CHAOS" in os.environ else None
strategy, epochs = WAYS[sys.argv[1]](), int(sys.argv[2])
train = insitu.dataset("images/train").shuffle().batch(48).map(lambda x, y: (x.reshape(len(x), 64) / 16, y))
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)


class Slow(keras.callbacks.Callback):
    """Keeps the training from running away while faults are injected, at its end most of all."""

    def on_epoch_begin(self, epoch, logs=None):
        self.pause = 0.04 if epoch < epochs - 5 else 1.5

    def on_train_batch_end(self, batch, logs=None):
        if faults is not None and faults.exists():
            time.sleep(self.pause)


model.fit(train, epochs=epochs, verbose=0, callbacks=[Slow(), insitu.BackupAndRestore()])
print("RESULT", hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest())
