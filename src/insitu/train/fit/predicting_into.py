"""`insitu.predict_into`: predictions of all rows of a dataset, kept under the keys of the rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from insitu.context import context as context_of_process
from insitu.errors import InputError
from insitu.grid import Dataset, KeyReader, open_target

_VALUE = "value"


def predict_into(
    model: Any, dataset: Dataset, target: str, *, key: str | None = None, type_name: str | None = None
) -> int:
    """Predict the rows of `dataset`, and keep each prediction under the key of its row.

    `target` is a cache of Apache Ignite, ignite://HOST[:PORT][,HOST...]/NAME, which is made if need be, or
    the name of a cache of insitu, which gets a new version. `key` is the column of the dataset's cache whose
    values are the keys, by default "key"; the dataset needn't have it among its features. Labels are left
    out.

    One output of shape [rows] or [rows, 1] makes a number, of another shape an array; several make the
    fields of an object of class `type_name`, by default NAME, or several columns. In a job each task predicts
    the rows of its own shards with its own replica; with --refresh the newest ones. What is done again, after
    a failure, replaces itself.

    Returns how many rows this task has predicted. Raises InputError and SourceError.
    """
    if not isinstance(dataset, Dataset) or dataset.passes != 1:
        raise InputError(
            f"predict_into takes an insitu.Dataset of one pass. Received: {dataset!r}. Make one by "
            f"insitu.dataset(NAME).batch(SIZE), without repeat"
        )
    dataset = dataset.at_epoch(None)
    batches = dataset.batch_size  # raises without one
    keys = KeyReader(dataset, key)
    written = open_target(target, dataset, context_of_process(), keys.column, type_name)
    rows = 0
    whole = False
    try:
        for shard in dataset.shards:
            if written.has(shard):
                rows += dataset.rows_of_shard(shard)
                continue
            for batch in dataset.shard_batches(shard, 0):
                if batch.rows and batches:
                    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch.data)
                    outputs = name_outputs(model, model.predict_on_batch(x))
                    written.write(shard, keys.read(shard, batch), outputs)
                    rows += batch.rows
            written.complete(shard)
        whole = True
    finally:
        written.close(whole=whole)
    return rows


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
