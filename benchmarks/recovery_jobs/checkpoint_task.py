"""Trains the same model by turns without checkpoints and with one every so many steps."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import models

told = models.options()

import keras  # noqa: E402

import insitu  # noqa: E402

EVERY, PERIODS = told["every"], told["periods"]


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Seconds a step over whole periods, each with one checkpoint if there are any.

    A checkpoint is taken after all callbacks have heard of a step's end, so the time from the end of step
    EVERY to that of step (PERIODS + 1) * EVERY holds PERIODS of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.began = self.seconds = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 == EVERY:
            self.began = time.perf_counter()
        elif batch + 1 == (PERIODS + 1) * EVERY:
            self.seconds = (time.perf_counter() - self.began) / (PERIODS * EVERY)


strategy = insitu.MultiWorkerMirroredStrategy()
rows = insitu.dataset(told["cache"]).batch(models.ROWS)
with strategy.scope():
    model = models.model(keras, told["model"])
folder = insitu.context().checkpoint_dir


def run(save: bool) -> float:
    clock = Clock()
    callbacks = [clock, *([insitu.BackupAndRestore(save_freq=EVERY)] if save else [])]
    model.fit(rows, epochs=1, steps_per_epoch=(PERIODS + 1) * EVERY + 1, verbose=0, callbacks=callbacks)
    if folder is not None and insitu.context().is_chief:
        for old in Path(folder).glob("fit-*"):
            shutil.rmtree(old)
    return clock.seconds


figures: dict[str, list[float]] = {"none": [], "checkpoints": []}
run(True)
for _ in range(told["rounds"]):
    figures["none"].append(run(False))
    figures["checkpoints"].append(run(True))
models.tell(told, figures)
