"""Keras' own callbacks that write files, through the loss of all tasks: one task writes, all take it up."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_runs import insitu_at

SCRIPT = """
import csv, os, signal, sys
import keras
import numpy as np
import insitu

out = sys.argv[1]
me = insitu.context()
keras.utils.set_random_seed(1)
strategy = insitu.MultiWorkerMirroredStrategy()
rng = np.random.default_rng(0)
x, y = rng.normal(size=(50, 4)).astype("float32"), rng.normal(size=(50, 1)).astype("float32")


def make():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    return model


class Die(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        print("EPOCH", epoch)

    def on_train_batch_end(self, batch, logs=None):
        if me.index == 1 and (self.epoch, batch) == (2, 1) and not os.path.exists(f"{out}/died"):
            open(f"{out}/died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


with strategy.scope():
    model = make()
callbacks = [
    keras.callbacks.BackupAndRestore(f"{out}/backup"),
    keras.callbacks.ModelCheckpoint(f"{out}/last.keras"),
    keras.callbacks.CSVLogger(f"{out}/log.csv", append=True),
    Die(),
]
options = {"batch_size": 16, "epochs": 4, "verbose": 0, "shuffle": False}
model.fit(x, y, callbacks=callbacks, **options)
if me.is_chief:
    plain = make()
    history = plain.fit(x, y, **options).history["loss"]
    for got, expected in zip(model.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    saved = keras.models.load_model(f"{out}/last.keras")
    np.testing.assert_array_equal(saved.get_weights()[0], model.get_weights()[0])
    with open(f"{out}/log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"], rows
    np.testing.assert_allclose([float(row["loss"]) for row in rows], history, rtol=1e-5)
    print("RESULT equal")
"""


@pytest.mark.slow
def test_keras_own_backup_is_restored_by_all_tasks(tmp_path: Path) -> None:
    with insitu_at(tmp_path) as insitu:
        insitu.script(SCRIPT)
        done = insitu.start("--workers", "2", "--on-loss", "restart", command=("train.py", str(tmp_path)))
        assert (tmp_path / "died").exists()
        lines = done.job.output.read_text().splitlines()
        second = next(i for i, line in enumerate(lines) if "attempt 2 starts" in line)
        assert any("RESULT equal" in line for line in lines)
        entered = [line.split("EPOCH ")[1] for line in lines[second:] if "EPOCH" in line]
        assert sorted(entered) == ["2", "2", "3", "3"]
