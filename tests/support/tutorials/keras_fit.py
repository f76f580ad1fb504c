"""Keras' fit with callbacks: checkpoints of weights, a schedule of learning rates, a model that is saved and
loaded with and without the strategy."""

from __future__ import annotations

import os
import pathlib

import keras
import tensorflow as tf
from tutorial_run import images, make_strategy, report, weights_of

strategy = make_strategy()
BATCH, EPOCHS = 16, 4
folder = pathlib.Path(os.environ["TUTORIAL_RESULTS"])

x, y = images()


def scale(image, label):
    return tf.cast(image, tf.float32) / 2, label


train = tf.data.Dataset.from_tensor_slices((x, y)).map(scale).cache().shuffle(90, seed=4).batch(BATCH)
test = tf.data.Dataset.from_tensor_slices((x[:35], y[:35])).map(scale).batch(BATCH)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(learning_rate=0.01),
        metrics=["accuracy"],
    )


def decay(epoch):
    return 1e-2 if epoch < 2 else 1e-3


rates = []


class KeepRate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rates.append(float(model.optimizer.learning_rate.numpy()))


prefix = folder / "checkpoints" / "ckpt_{epoch:04d}.weights.h5"
callbacks = [
    keras.callbacks.ModelCheckpoint(filepath=str(prefix), save_weights_only=True),
    keras.callbacks.LearningRateScheduler(decay),
    KeepRate(),
]
history = model.fit(train, epochs=EPOCHS, callbacks=callbacks, verbose=2).history

latest = sorted((folder / "checkpoints").glob("*"))[-1]
model.load_weights(latest)
evaluated = model.evaluate(test, verbose=0)

path = folder / f"{os.environ.get('INSITU_TASK', 'alone').replace(':', '-')}.keras"
model.save(path)


def load():
    loaded = keras.models.load_model(path)
    loaded.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(),
        metrics=["accuracy"],
    )
    return loaded


alone = load().evaluate(test, verbose=0)
with strategy.scope():
    replicated = load()
    again = replicated.evaluate(test, verbose=0)
report(
    loss=history["loss"],
    accuracy=history["accuracy"],
    rates=rates,
    evaluated=evaluated,
    alone=alone,
    again=again,
    weights=weights_of(model),
)
