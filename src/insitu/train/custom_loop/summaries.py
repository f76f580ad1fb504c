"""Let one replica of each process write summaries."""

from __future__ import annotations

import contextlib
from typing import Any

import keras


def record_summaries(replica_id: Any, first: int) -> contextlib.AbstractContextManager[Any]:
    """Return a scope in which `tf.summary` writes for replica number `first` alone, as with `tf.distribute`.
    `replica_id` is that of the replica that runs, a tensor."""
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    from insitu.train.custom_loop import tf_distribute

    return tf_distribute.record_summaries(replica_id, first)
