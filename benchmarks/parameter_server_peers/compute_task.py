"""Compute alone, one process on one core: plain Keras with the same model and optimizer; then, the floor, one
compiled function that gives the gradient of a batch and does nothing else."""

import json
import os
import sys
import time

import models

models.keep_to_core(json.loads(os.environ["TF_CONFIG"])["task"]["index"])

import keras  # noqa: E402

size = sys.argv[1]
model = models.keras_model(keras, size)
model.compile(
    keras.optimizers.SGD(models.LEARNING_RATE),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
x, y = models.rows(models.BATCH * models.STEPS[size], 0)
batches = [(x[i : i + models.BATCH], y[i : i + models.BATCH]) for i in range(0, len(x), models.BATCH)]
model.fit(x[: models.BATCH * 8], y[: models.BATCH * 8], batch_size=models.BATCH, verbose=0)
model.fit(x, y, batch_size=models.BATCH, shuffle=False, verbose=0)
started = time.perf_counter()
model.fit(x, y, batch_size=models.BATCH, shuffle=False, verbose=0)
print(f"RATE {len(batches) / (time.perf_counter() - started)}")

import tensorflow as tf  # noqa: E402


@tf.function(jit_compile=False)
def gradient(x, y):
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    return tape.gradient(loss, [variable.value for variable in model.trainable_variables])


tensors = [(tf.constant(x), tf.constant(y)) for x, y in batches]
for each in tensors[:8]:
    gradient(*each)
started = time.perf_counter()
for each in tensors:
    gradient(*each)
print(f"GRADIENT {len(tensors) / (time.perf_counter() - started)}")
