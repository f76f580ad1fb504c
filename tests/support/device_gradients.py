"""python device_gradients.py LOG_DIR: the gradients of two devices that a TensorBoard keeps are those by
which the weights change. The devices are virtual."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np

import insitu
from insitu.train.fit import trainer_of

insitu.config.set_virtual_devices(2)

ROWS = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
RATE = 0.5


class Compared(keras.callbacks.Callback):
    """Has one step in each epoch."""

    count = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.before = {v.path: keras.ops.convert_to_numpy(v).copy() for v in self.model.trainable_variables}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        (executor,) = trainer_of(self.model).executors
        gradients = getattr(executor, "unpinned", executor).read_gradients()
        assert gradients.keys() == self.before.keys()
        for variable in self.model.trainable_variables:
            change = self.before[variable.path] - keras.ops.convert_to_numpy(variable)
            np.testing.assert_allclose(gradients[variable.path], change / RATE, atol=1e-5)
        self.count += 1


for number, strategy in enumerate((insitu.MirroredStrategy, insitu.CentralStorageStrategy)):
    keras.utils.set_random_seed(1)
    with strategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    compared = Compared()
    board = insitu.TensorBoard(f"{sys.argv[1]}/{number}", histograms=("weights", "gradients"))
    model.fit(ROWS, ROWS[:, :1], batch_size=21, epochs=3, verbose=0, callbacks=[compared, board])
    assert compared.count == 3
