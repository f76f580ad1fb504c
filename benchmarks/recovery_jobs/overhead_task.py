"""Does the same step by turns through what makes recovery possible, and without it."""

from __future__ import annotations

import time
from typing import Any

import models
import numpy as np

told = models.options()

import keras  # noqa: E402

import insitu  # noqa: E402
from insitu.train.collectives.gather import squeeze_shards  # noqa: E402
from insitu.train.elastic.divergence import check_equal  # noqa: E402
from insitu.train.fit.trainer import trainer_of  # noqa: E402

STEPS = told["steps"]
strategy = insitu.MultiWorkerMirroredStrategy()
rows = insitu.dataset(told["cache"]).batch(models.ROWS)
with strategy.scope():
    model = models.model(keras, told["model"])
figures: dict[str, list[float]] = {"with": [], "without": [], "check": []}


class Bench(keras.callbacks.Callback):  # type: ignore[misc]
    """Works in the middle of a fit, where all is as in training."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch != 2:
            return
        trainer: Any = trainer_of(model)
        position = trainer.loop.position
        step = trainer._train_adapter.step_at(0, 0)
        for turn in range(told["rounds"] + 1):
            for name, run in (("with", self.through), ("without", self.bare)):
                began = time.perf_counter()
                for _ in range(STEPS):
                    run(trainer, step)
                if turn:
                    figures[name].append((time.perf_counter() - began) / STEPS)
            began = time.perf_counter()
            group = trainer.membership.lockstep.group
            check_equal(group, trainer.calls.fingerprint())
            if turn:
                figures["check"].append(time.perf_counter() - began)
        trainer.loop.position = position

    def through(self, trainer: Any, step: Any) -> None:
        """As `fit` does it: units, progress reports, a look for a newer roster, the ledger."""
        trainer._train(step)

    def bare(self, trainer: Any, step: Any) -> None:
        """The same calls of the replica and of the group, and nothing else."""
        work, group = trainer._train_executor, trainer.membership.lockstep.group
        work.compute(step.parts, group)
        means = work.exchange(group)
        records = np.asarray(group.all_gather(squeeze_shards(work._train_records)))
        work._replica.apply(means, records)


model.fit(rows, epochs=1, steps_per_epoch=4, verbose=0, callbacks=[Bench()])
models.tell(told, figures)
