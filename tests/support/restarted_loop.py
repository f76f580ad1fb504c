"""A custom loop that keeps a checkpoint of its own, and is killed: what each step was given, and the weights.

    restarted_loop.py OUT WAY [EPOCH:STEP ...]

The last worker dies before each of these steps, once. WAY is what the checkpoint holds: `weights`,
`state_dict`, `checkpoint` (of TensorFlow) or `set_epoch`; `steps` is as `weights`, but saved after each step,
and with `nothing` there is none.
Each task writes OUT/INDEX.jsonl with [epoch, step, sum of its rows], and its weights at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from matrix_models import value_and_gradients

import insitu

EPOCHS, BATCH = 4, 8
out, way, kills = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
me = insitu.context()
if way == "nothing":
    keras.utils.set_random_seed(1)
strategy = insitu.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
if way != "nothing" and not (out / "weights.npz").exists():
    model.set_weights([np.zeros((1, 1)), np.zeros(1)])
data = strategy.distribute_dataset(insitu.dataset("rows").shuffle().batch(BATCH))
log = (out / f"{me.index}.jsonl").open("a")


def tell(*values: Any) -> None:
    log.write(json.dumps(values) + "\n")
    log.flush()


def step(x: Any) -> Any:
    def forward() -> Any:
        losses = keras.ops.sum((model(x[:, None], training=True) - 3 * x[:, None]) ** 2, 1)
        return insitu.get_strategy().compute_average_loss(losses)

    loss, gradients = value_and_gradients(forward, model)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


def die_if_due(place: str) -> None:
    injected = out / f"injected-{place}"
    if place in kills and me.index == len(me.workers) - 1 and not injected.exists():
        injected.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class OwnFile:
    """Weights, epoch and, in some ways, the position of the data."""

    def restore(self) -> int:
        if way == "nothing" or not (out / "weights.npz").exists():
            return 0
        with np.load(out / "weights.npz") as found:
            model.set_weights([found["kernel"], found["bias"]])
            optimizer.iterations.assign(found["iterations"])
            if way == "state_dict":
                data.load_state_dict(json.loads(str(found["data"])))
            return int(found["epoch"])

    def save(self, epoch: int) -> None:
        if way == "nothing" or not me.is_chief:
            return
        kernel, bias = model.get_weights()
        values = {"kernel": kernel, "bias": bias, "epoch": epoch, "data": json.dumps(data.state_dict())}
        iterations = keras.ops.convert_to_numpy(optimizer.iterations.value)
        np.savez(out / "partial.npz", iterations=iterations, **values)
        (out / "partial.npz").replace(out / "weights.npz")


class TensorFlowsCheckpoint:
    """All of it, by TensorFlow."""

    def __init__(self) -> None:
        import tensorflow as tf

        self._tf, self._epoch = tf, tf.Variable(0)
        self._checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=self._epoch, data=data)

    def restore(self) -> int:
        newest = self._tf.train.latest_checkpoint(str(out / "checkpoints"))
        if newest:
            self._checkpoint.restore(newest).assert_existing_objects_matched()
        return int(self._epoch)

    def save(self, epoch: int) -> None:
        self._epoch.assign(epoch)
        if me.is_chief:
            self._checkpoint.save(str(out / "checkpoints" / "loop"))


kept = TensorFlowsCheckpoint() if way == "checkpoint" else OwnFile()
in_epochs = way in ("steps", "state_dict", "checkpoint")
epoch = kept.restore()
while epoch < EPOCHS:
    if way == "set_epoch":
        data.set_epoch(epoch)
    for index, rows in enumerate(data):
        if in_epochs:
            index = data.state_dict()["step"] - 1
        die_if_due(f"{epoch}:{index}")
        x = keras.ops.cast(rows, "float32")
        tell(epoch, index, round(float(keras.ops.sum(x)), 4))
        strategy.run(step, args=(x,))
        if in_epochs:
            kept.save(epoch)
        if way == "set_epoch" and index == 2:
            break
    epoch += 1
    if not in_epochs:
        kept.save(epoch)
    die_if_due(f"{epoch}:begin")
tell("weights", [weight.ravel().tolist() for weight in model.get_weights()])
