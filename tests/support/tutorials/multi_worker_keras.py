"""Keras' fit in several workers, on data that repeats: a saved model, a checkpoint, a backup."""

from __future__ import annotations

import os

import keras
import numpy as np
import tensorflow as tf
from tutorial_run import images, make_strategy, report, weights_of

BATCH, EPOCHS, STEPS = 32, 2, 5
folder = os.environ["TUTORIAL_RESULTS"]


def data(batch_size):
    x, y = images()
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(90, seed=5).repeat().batch(batch_size)


def make_model():
    model = keras.Sequential(
        [
            keras.layers.InputLayer(shape=(8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.01),
        metrics=["accuracy"],
    )
    return model


strategy = make_strategy()
with strategy.scope():
    model = make_model()
history = model.fit(data(BATCH), epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0).history

resolver = strategy.cluster_resolver
task_type, task_id = (None, None) if resolver is None else (resolver.task_type, resolver.task_id)


def is_chief():
    return (task_type == "worker" and task_id == 0) or task_type is None


def path_of(name):
    """The chief's path, or one for a worker that throws its own away."""
    where = folder if is_chief() else os.path.join(folder, f"workertemp_{task_id}")
    tf.io.gfile.makedirs(where)
    return os.path.join(where, name)


model.save(path_of("model.keras"))
loaded = keras.models.load_model(path_of("model.keras"))
same = float(np.abs(weights_of(loaded) - weights_of(model)).max())
alone = loaded.fit(data(BATCH), epochs=1, steps_per_epoch=3, verbose=0).history["loss"]

checkpoint = tf.train.Checkpoint(model=model)
manager = tf.train.CheckpointManager(checkpoint, directory=path_of("checkpoints"), max_to_keep=1)
manager.save()
checkpoint.restore(tf.train.latest_checkpoint(path_of("checkpoints"))).expect_partial()
second = model.fit(data(BATCH), epochs=1, steps_per_epoch=4, verbose=0).history["loss"]
if not is_chief():
    tf.io.gfile.rmtree(os.path.dirname(path_of("model.keras")))

backup = keras.callbacks.BackupAndRestore(backup_dir=os.path.join(folder, "backup"))
with strategy.scope():
    third = make_model()
third_loss = third.fit(
    data(BATCH), epochs=EPOCHS, steps_per_epoch=STEPS, callbacks=[backup], verbose=0
).history["loss"]
report(
    loss=history["loss"],
    accuracy=history["accuracy"],
    same=same,
    alone=alone,
    second=second,
    third=third_loss,
    weights=weights_of(model),
)
