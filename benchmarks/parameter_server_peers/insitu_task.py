"""insitu's ParameterServerStrategy with Keras 3 on TensorFlow: one task, as TF_CONFIG says.

python insitu_task.py SIZE MODE [SLOW_INDEX SLOW_SECONDS]

MODE is a mode of the strategy, or `backup`: sync, where a step takes the first gradient that comes.
"""

import json
import os
import sys
import time

import models

task = json.loads(os.environ["TF_CONFIG"])["task"]
workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
index = task["index"]
os.environ["INSITU_TASK"] = f"{task['type']}:{index}"
if task["type"] == "worker":
    models.keep_to_core(index)
    os.environ["INSITU_SHARDS"] = f"{index}/{workers}"
else:
    os.environ["INSITU_SHARDS"] = f"/{workers}"

import keras  # noqa: E402

import insitu  # noqa: E402

size, mode = sys.argv[1:3]
slow_index, slow_seconds = (int(sys.argv[3]), float(sys.argv[4])) if len(sys.argv) > 3 else (-1, 0.0)
options = {"mode": "sync", "replicas_to_aggregate": 1} if mode == "backup" else {"mode": mode}
strategy = insitu.ParameterServerStrategy(**options)
with strategy.scope():
    model = models.keras_model(keras, size)
    model.compile(
        keras.optimizers.SGD(models.LEARNING_RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


class Epochs(keras.callbacks.Callback):
    """Seconds that the last epoch took."""

    def on_epoch_begin(self, epoch, logs=None):
        self.started = time.time()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.time() - self.started


class Steps(Epochs):
    """When each step ended, and the loss of its epoch so far. One worker waits in each."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        if index == slow_index:
            time.sleep(slow_seconds)
        self.ends.append(time.time())
        self.losses.append(float(logs["loss"]))


clock = Steps() if slow_index >= 0 else Epochs()
x, y = models.rows(models.BATCH * workers * models.STEPS[size], 0)
model.fit(x, y, batch_size=models.BATCH * workers, shuffle=False, epochs=2, verbose=0, callbacks=[clock])
if isinstance(clock, Steps):
    print("STEPS", json.dumps({"start": clock.ends[0], "ends": clock.ends, "losses": clock.losses}))
print(f"RATE {models.STEPS[size] / clock.seconds}", flush=True)
