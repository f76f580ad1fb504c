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
    """Seconds a step of each period, which holds one checkpoint if there are any.

    A checkpoint is taken after all callbacks have heard of a step's end, so the time between the ends of two
    steps whose numbers EVERY divides holds one. The first of a fit, for which memory is got from the system,
    is before the first period.
    """

    def __init__(self) -> None:
        super().__init__()
        self.began = 0.0
        self.seconds: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (batch + 1) % EVERY == 0:
            now = time.perf_counter()
            if batch + 1 > 2 * EVERY:
                self.seconds.append((now - self.began) / EVERY)
            self.began = now


strategy = insitu.MultiWorkerMirroredStrategy()
rows = insitu.dataset(told["cache"]).batch(models.ROWS)
with strategy.scope():
    model = models.model(keras, told["model"])
folder = insitu.context().checkpoint_dir


def run(save: bool) -> list[float]:
    clock = Clock()
    callbacks = [clock, *([insitu.BackupAndRestore(save_freq=EVERY)] if save else [])]
    model.fit(rows, epochs=1, steps_per_epoch=(PERIODS + 2) * EVERY + 1, verbose=0, callbacks=callbacks)
    if folder is not None and insitu.context().is_chief:
        for old in Path(folder).glob("fit-*"):
            shutil.rmtree(old)
    return clock.seconds


figures: dict[str, list[float]] = {"none": [], "checkpoints": []}
run(True)
for _ in range(told["rounds"]):
    figures["none"] += run(False)
    figures["checkpoints"] += run(True)
models.tell(told, figures)
