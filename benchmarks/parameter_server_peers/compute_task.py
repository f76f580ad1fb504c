"""Compute alone, the floor: the same model and optimizer in plain Keras, one process on one core."""

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
