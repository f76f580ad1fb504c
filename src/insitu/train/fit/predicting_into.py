"""`insitu.predict_into`: predictions of all rows of a dataset, kept with the ids of the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.context import context as context_of_process
from insitu.base.errors import InputError, TrainingError
from insitu.exchange import Group
from insitu.grid import Batch, Dataset, IdReader, open_target
from insitu.train.collectives import barrier_token
from insitu.train.fit.adapter import check_all_shards
from insitu.train.fit.trainer import KerasTrainer, trainer_of

_VALUE = "value"


def predict_into(
    model: Any, dataset: Dataset, target: str, *, key: str | None = None, type_name: str | None = None
) -> int:
    """Predict the rows of `dataset`, and keep each prediction with the id of its row.

    `target` is a file NAME.parquet or NAME.csv, which is replaced; the name of a cache of insitu, which gets
    a new version; or a cache of Apache Ignite, ignite://HOST[:PORT][,HOST...]/NAME, which is made if need be.

    Files and caches of insitu have a column "row": the number of the row in the version, which the feature
    "row" of `insitu.dataset` gives. `key` is a column of the dataset's cache with keys of the rows, by
    default "key" if there is one; its values are in a column "key", too. The dataset needn't have either
    among its features. Ignite keeps a prediction under the key of its row, or else under its number. Labels
    are left out. Rows come in no particular order.

    One output of shape [rows] or [rows, 1] makes a number "value", of another shape an array (in CSV columns
    value_0, value_1 and so on); several make columns by their names, or fields of an object of class
    `type_name`, by default NAME.

    In a job each task predicts the rows of its own shards with its own replica; with --refresh the newest
    ones. All workers make the call, or one for which the others have ended, and it returns once all rows are
    there. Work that is repeated after a failure replaces itself. On parameter servers each worker calls
    alone: the last one that does completes the target.

    Returns how many rows this task has predicted. Raises InputError, SourceError, and TrainingError for a
    model of no strategy that is given a part of the rows.

    Example:
        >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
        >>> rows = insitu.dataset("digits/train").batch(32)
        >>> insitu.predict_into(model, rows, "guesses.csv")
        100
    """
    if not isinstance(dataset, Dataset) or dataset.passes != 1:
        raise InputError(
            f"predict_into takes an insitu.Dataset of one pass. Received: {dataset!r}. Make one by "
            f"insitu.dataset(NAME).batch(SIZE), without repeat"
        )
    dataset = dataset.at_epoch(None)
    steps = dataset.num_steps  # raises without a batch
    ids, context, trainer = IdReader(dataset, key), context_of_process(), trainer_of(model)
    if trainer is None:
        check_all_shards(dataset)
        context = replace(context, job_id=None)  # this task alone predicts all
    written = open_target(target, dataset, context, ids.key, type_name)
    rows = _Predictor(model, dataset, ids, written)
    whole = False
    try:
        if trainer is not None and trainer.membership.shards_move and len(context.workers) > 1:
            if written.joins_parts and trainer.calls.is_under_way:
                raise TrainingError(
                    "In a job predict_into is called by the script. Received: a call in the middle of "
                    "another, as by a callback. Call it after fit"
                )
            shards = _predict_together(trainer, dataset, rows.advance)
        else:
            shards = dataset.shards
            for shard in shards:
                rows.advance(shard, steps - 1)
        whole = True
    finally:
        rows.close()
        written.close(whole=whole)
    return sum(map(dataset.rows_of_shard, shards))


def _predict_together(
    trainer: KerasTrainer, dataset: Dataset, advance: Callable[[int, int], None]
) -> tuple[int, ...]:
    """Have each task call `advance(shard, step)` for each step and each of its shards, in a call as `predict`
    is one: tasks wait for each other, and another may take a lost one's place, or its shards. Returns the
    shards that this task has at the end."""
    membership = trainer.membership

    def work(step: int, group: Group) -> NDArray[Any]:
        for shard in membership.context.shards_of_job:
            advance(shard, step)
        return barrier_token(group)

    def run() -> Any:
        if trainer.enter_prediction(dataset) is None:
            return trainer.calls.recall(trainer)
        with trainer.bookkeeper.evaluating():
            for step in range(dataset.num_steps):
                trainer.loop.position = position = trainer.loop.position.at_prediction(step)
                membership.lockstep.run_unit_until_done(position, partial(work, step))
        return None

    trainer.run_call("predict_into", run)
    return membership.context.shards_of_job


class _Predictor:
    """Predicts the rows of shards step by step, and hands over what comes out."""

    def __init__(self, model: Any, dataset: Dataset, ids: IdReader, written: Any) -> None:
        self._model, self._dataset, self._ids, self._written = model, dataset, ids, written
        #: The generators of the batches that come next, by shard. Written by `advance`.
        self._batches: dict[int, Any] = {}
        #: Steps that are done, by shard; all of them for one that was written before.
        self._done: dict[int, int] = {}

    def advance(self, shard: int, step: int) -> None:
        """Predict the rows of a shard up to and with those of `step`, unless that is done."""
        steps = self._dataset.num_steps
        if shard not in self._done:
            self._done[shard] = steps if self._written.has(shard) else 0
            self._batches[shard] = self._dataset.shard_batches(shard, 0)
        while self._done[shard] <= step:
            self._write(shard, next(self._batches[shard]))
            self._done[shard] += 1
            if self._done[shard] == steps:
                self._written.complete(shard)

    def _write(self, shard: int, batch: Batch) -> None:
        if not batch.rows:
            return
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch.data)
        outputs = name_outputs(self._model, self._model.predict_on_batch(x))
        self._written.write(shard, self._ids.read(shard, batch), outputs)

    def close(self) -> None:
        """Read no more rows."""
        for batches in self._batches.values():
            batches.close()


def name_outputs(model: Any, outputs: Any) -> dict[str, Any]:
    """Return the outputs of a model by name, as arrays [rows, ...]; one alone is called "value"."""
    if isinstance(outputs, dict):
        named = dict(outputs)
    elif isinstance(outputs, (list, tuple)):
        names = getattr(model, "output_names", None) or [f"output_{n}" for n in range(len(outputs))]
        named = dict(zip(names, outputs, strict=True))
    else:
        named = {_VALUE: outputs}
    return {name: _simplify(np.asarray(values)) for name, values in named.items()}


def _simplify(values: Any) -> Any:
    """Return an array without a last axis of length 1, and in a dtype that other languages have."""
    if values.dtype.kind == "V" or values.dtype.name == "bfloat16":
        values = values.astype(np.float32)
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
