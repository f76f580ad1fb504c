"""Attach tables on servers to the Embeddings of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from insitu.train.parameter_server.layers import embeddings_of
from insitu.train.parameter_server.lookup import find_key_inputs
from insitu.train.parameter_server.model_spec import check_norms_of_rows
from insitu.train.parameter_server.session import DEFAULT_SHARD_ROWS, ParameterServerSession
from insitu.train.replica import inner_optimizer, replace_optimizer


def attach_tables(
    model: Any,
    example: Any,
    part_rows: int | None,
    session: Callable[[], ParameterServerSession],
    optimizer: Any,
    *,
    bounded: bool = False,
) -> None:
    """Attach a table of `session()` to each Embedding of `model`, with room for the keys of one shard's batch
    like `example`, of `part_rows` rows if that is known. `optimizer` updates the tables' rows. The worker
    clips the norms of the rows' gradients if `bounded`; else they must have no bounds."""
    layers = embeddings_of(model)
    if not layers:
        return
    if not bounded:
        check_norms_of_rows(optimizer)
    leaves = find_key_inputs(model, layers, example)
    arrays = keras.tree.flatten(example)
    for layer, numbers in zip(layers, leaves, strict=True):
        if layer.rows is None or not getattr(layer.rows, "insitu_rows", False):
            keys = sum(int(arrays[n][0].size) for n in numbers) * (part_rows or DEFAULT_SHARD_ROWS)
            layer.attach(session().table(layer, optimizer), keys)
            # A loaded one knows the saved tables, or none, and servers don't take over its state.
            if model.optimizer is not None and inner_optimizer(model.optimizer).built:
                replace_optimizer(model)
