"""train.py EPOCHS: a small training that takes a while, for a page to look at."""

import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

import insitu

strategy = insitu.MultiWorkerMirroredStrategy()
train = insitu.dataset("drawings/train").shuffle().batch(64).map(lambda x, y: (x / 255, y))
held_out = insitu.dataset("drawings/test").batch(256).map(lambda x, y: (x / 255, y))
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((784,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])


class Slow(keras.callbacks.Callback):
    """Leaves time to look."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.03)


model.fit(
    train,
    epochs=int(sys.argv[1]),
    validation_data=held_out,
    verbose=2,
    callbacks=[Slow(), insitu.BackupAndRestore(save_freq=20)],
)
if insitu.context().is_chief:
    model.save("drawings.keras")
