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
strategy = WAYS[sys.argv[1]]()
train = insitu.dataset("images/train").shuffle().batch(48).map(lambda x, y: (x.reshape(len(x), 64) / 16, y))
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)


class Slow(keras.callbacks.Callback):
    """Keeps the training from running away while faults are injected."""

    def on_train_batch_end(self, batch, logs=None):
        if faults is not None and faults.exists():
            time.sleep(0.03)


model.fit(train, epochs=int(sys.argv[2]), verbose=0, callbacks=[Slow(), insitu.BackupAndRestore()])
print("RESULT", hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest())
