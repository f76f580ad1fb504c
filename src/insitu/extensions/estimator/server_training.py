"""Training by global steps on parameter servers: what is saved, who ends it, and how it continues.

A global step is an update that the servers make, of whichever worker's gradient. So workers don't count their
own steps: each reads the number with what it pulls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from insitu.base.errors import TrainingError
from insitu.base.measure.time_account import ACCOUNT, CHECKPOINT
from insitu.train.checkpoint import BackupAndRestore, Checkpoint, CheckpointStore, checkpoint_key
from insitu.train.fit import KerasTrainer, trainer_of
from insitu.train.parameter_server import UpdatePlan, embeddings_of
from insitu.train.replica import load_weights, name_update_count, views
from insitu.train.strategies import HybridStrategy, ParameterServerStrategy

_LOG = logging.getLogger("insitu")


def find_servers(model: Any) -> ParameterServerStrategy | None:
    """Return the strategy of a model whose variables are on servers, else None."""
    trainer = trainer_of(model)
    strategy = trainer.strategy if trainer is not None else None
    return strategy if isinstance(strategy, ParameterServerStrategy) else None


class ServerCheckpoints(BackupAndRestore):
    """Saves what the chief has pulled, for evaluators and later jobs, and has the servers save their state.

    Recoveries in a job are by the servers' checkpoints alone, which have the optimizers' state as well. A
    checkpoint's epoch is its number of updates: workers are in different epochs.
    """

    def _needs_last_save(self, epochs: int) -> bool:
        # Also of a chief that was restarted when all steps were done.
        return True

    def _save_at(self, epoch: int, step: int, **more: Any) -> None:
        # Where a fit has ended in its epochs says nothing of servers: `more` isn't kept.
        trainer = self._trainer()
        if self._writer is None or not trainer.membership.is_leader:
            return
        trainer.strategy.save_elsewhere()
        updates = trainer.strategy.count_updates() or 0
        with ACCOUNT.hold(CHECKPOINT):
            values = dict(views(trainer.state))
            if self.model.optimizer is not None:
                values[name_update_count(self.model.optimizer)] = np.array(
                    updates, keras.backend.standardize_dtype("int")
                )
            self._writer.submit(Checkpoint(updates, 0, values, self._more(trainer, epoch)))


class ServerStop(keras.callbacks.Callback):
    """Ends a training on servers for all workers, by their number of updates. Where the chief ends before, by
    a hook of its own, the others end as soon as they know."""

    hears_batches = False
    """Read by `fit`, which calls `end_step` instead."""

    def __init__(self, servers: ParameterServerStrategy) -> None:
        super().__init__()
        # In a function, so that it stays in this process.
        self._find: Callable[[], ParameterServerStrategy] = lambda: servers

    def end_step(self, logs: Any) -> None:
        """Hear of a step that was done."""
        updates = self._find().updates
        if updates is not None and updates.is_over():
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        servers = self._find()
        if self.model.stop_training and not servers.ends_together:
            end_for_all(servers)


def end_for_all(servers: ParameterServerStrategy) -> bool:
    """End the training for all workers, if this is the chief: where they end together, with the step that
    comes next, since others may be in it. Returns whether it ends for this one now."""
    updates = servers.updates
    if updates is None or not servers.membership.context.is_chief:
        return False
    if not updates.is_at_limit:
        updates.end_at(updates.count + int(servers.ends_together))
    return updates.is_at_limit


def plan_training(
    trainer: KerasTrainer,
    servers: ParameterServerStrategy,
    max_steps: int | None,
    store: CheckpointStore | None,
    *,
    asks: bool,
) -> None:
    """Have the next fit end with `max_steps` updates. The first one continues from the newest checkpoint in
    `store` of an earlier job. `asks`: the chief may end it for all. Raises TrainingError."""
    first = 0
    if servers.updates is None and trainer.membership.context.is_chief and store is not None:
        first = load_newest(trainer, store)
    servers.plan_updates(UpdatePlan(max_steps, first, asks and servers.ends_together))


def count_steps_between(servers: ParameterServerStrategy, updates: int) -> int:
    """Return the steps of a worker in which there are so many updates of the model: each worker's step is
    one, unless they make it together."""
    return updates if servers.ends_together else max(1, updates // servers.num_replicas_in_sync)


def load_newest(trainer: KerasTrainer, store: CheckpointStore) -> int:
    """Give the model the newest weights that another job has saved. Returns the updates that they have had;
    0 without any. A job that is started again takes up its servers' state instead."""
    job = trainer.membership.context.job_id
    for position in reversed(store.positions()):
        found = store.load(position)
        if found is None or (job is not None and (found.more or {}).get("job") == job):
            continue
        load_weights(trainer.state, found.values)
        updates = int(found.values.get(name_update_count(trainer.model.optimizer), np.zeros(())))
        _LOG.warning(
            "Training continues from the weights of %s, after %d updates. The servers' optimizer begins "
            "without its state",
            store.path_of(position),
            updates,
        )
        return updates
    return 0


def open_store(
    trainer: KerasTrainer, directory: str | Path | None, series: int | None, keep: int
) -> CheckpointStore | None:
    """Return the checkpoints that the next training writes; None where it writes none. `series` is the number
    of their series; None: that of the next fit."""
    context = trainer.membership.context
    place = directory or context.checkpoint_dir
    if place is None:
        return None
    key = None if directory else checkpoint_key(context)
    return CheckpointStore(place, trainer.membership.fits if series is None else series, keep, key)


def check_tables(trainer: KerasTrainer, store: CheckpointStore | None, has_evaluator: bool) -> None:
    """Raise TrainingError if a model with tables on servers can't be evaluated or continue."""
    tables = embeddings_of(trainer.model)
    if not tables or not isinstance(trainer.strategy, ParameterServerStrategy | HybridStrategy):
        return
    name = tables[0].name
    if has_evaluator:
        raise TrainingError(
            "An evaluator has no parameter servers, so it can't score tables on them. Received: a model with "
            f"the insitu.layers.Embedding {name!r}, in a job with --evaluator. Start it without: then it is "
            "evaluated in turn."
        )
    job = trainer.membership.context.job_id
    positions = store.positions() if store is not None and trainer.fit_index < 0 else ()
    newest = store.load(positions[-1]) if store is not None and positions else None
    if newest is not None and (job is None or (newest.more or {}).get("job") != job):
        raise TrainingError(
            "Tables on servers are saved in the folder of their job. Received: checkpoints of another job in "
            f"model_dir, and a model with the insitu.layers.Embedding {name!r}. Resume that job by `insitu "
            "resume`, or pass another model_dir."
        )
