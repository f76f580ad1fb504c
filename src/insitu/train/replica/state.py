"""Which variables a model has, and how each is combined over shards. Works on every Keras backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.errors import CheckpointError, TrainingError
from insitu.exchange import Group
from insitu.train.collectives import gather_sizes, share

_WORTHWHILE = 1 << 16
"""Bytes of an array for which it pays to spare copies."""

SEED_STRIDE = 0x9E3779B1
"""What tells the shards' random streams apart: added to a seed generator's seed once per shard number.
Odd, so that shards never meet modulo 2**32; shard 0 keeps the plain seed, as in a run without insitu."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """The variables of one model, each in exactly one list, in the order of Keras.

    - `trainable`: updated by the optimizer from the mean gradient; in the order of Keras, but for the rows
      that a batch has pulled out of tables on servers, which come last.
    - `mean`: floating state that the forward pass moves; after a step it is the mean over shards by rows.
    - `seeds`: states of seed generators, `[seed, counter]`.
    - `first`: other state; after a step it is that of the first shard that had rows.
    - `sums`: metric variables that add up over rows, hence over shards.
    - `metric_first`: metric variables that don't add up; handled as `first`.
    - `optimizer`: the same on every replica, since all apply the same update.
    """

    trainable: tuple[Any, ...]
    mean: tuple[Any, ...]
    seeds: tuple[Any, ...]
    first: tuple[Any, ...]
    sums: tuple[Any, ...]
    metric_first: tuple[Any, ...]
    optimizer: tuple[Any, ...]

    def named(self) -> Iterator[tuple[str, Any]]:
        """Every variable once, under a name that is the same in each run of the same script."""
        for group in ("trainable", "mean", "seeds", "first", "sums", "metric_first", "optimizer"):
            for index, variable in enumerate(getattr(self, group)):
                yield f"{group}/{index}", variable


def is_floating(variable: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(variable.dtype)


def read_state(model: Any) -> ModelState:
    """Sorts the variables of a built and compiled `model`."""
    seeds = {id(generator.state): generator.state for generator in seed_generators(model)}
    optimizer = getattr(model, "optimizer", None)
    metrics = {id(v): v for v in model.metrics_variables}
    trainable = tuple(
        sorted((_unwrapped(v) for v in model.trainable_variables), key=lambda v: holds_rows_of_table(v))
    )
    mean: list[Any] = []
    first: list[Any] = []
    # A custom loop knows which of them its step leaves alone: those needn't travel.
    elsewhere = {*seeds, *metrics, *map(id, getattr(model, "unmoved_variables", ()))}
    for variable in model.non_trainable_variables:
        if id(variable) in elsewhere:
            continue
        averaged = is_floating(variable) and getattr(variable, "aggregation", "mean") in ("mean", "none")
        (mean if averaged else first).append(variable)
    sums = [v for v in metrics.values() if getattr(v, "aggregation", "sum") == "sum"]
    others = [v for v in metrics.values() if getattr(v, "aggregation", "sum") != "sum"]
    return ModelState(
        trainable=trainable,
        mean=tuple(mean),
        seeds=tuple(seeds.values()),
        first=tuple(first),
        sums=tuple(sums),
        metric_first=tuple(others),
        optimizer=tuple(optimizer.variables) if optimizer is not None else (),
    )


def _unwrapped(variable: Any) -> Any:
    return variable.variable if hasattr(variable, "variable") else variable


def holds_rows_of_table(variable: Any) -> bool:
    """Whether the variable holds what a batch pulled out of a table on parameter servers."""
    return bool(getattr(variable, "insitu_rows", False))


def seed_generators(model: Any) -> list[Any]:
    """The seed generators of the model's layers, each once."""
    found = {}
    for layer in model._flatten_layers():
        for generator in getattr(layer, "_seed_generators", ()):
            found[id(generator.state)] = generator
    return list(found.values())


def check_trainable_by_shards(model: Any, num_shards: int) -> None:
    """Raises TrainingError where the mean over shards would not be what the user's loss says."""
    if num_shards == 1:
        return
    for loss in _losses(model):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean"):
            raise TrainingError(
                "A loss over several shards must be a mean over rows: reduction='sum_over_batch_size' (the "
                f"default) or 'mean'. Received: {getattr(loss, 'name', loss)!r} with {reduction!r}. "
                "Use the default, and scale the learning rate if you want the size of a sum."
            )
    others = [
        name
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer
    ]
    if others:
        raise TrainingError(
            "Gradients are combined over shards for the optimizer given to compile(). Received: a model with "
            f"more optimizers ({', '.join(others)}), whose gradients would stay apart."
        )


def _losses(model: Any) -> list[Any]:
    compiled = getattr(model, "_compile_loss", None)
    entries = getattr(compiled, "_flat_losses", None) or []
    return [entry.loss for entry in entries if entry is not None and entry.loss is not None]


def to_numpy(variable: Any) -> NDArray[Any]:
    """The variable's value as a NumPy array of its own dtype, a copy."""
    return np.array(view(variable))


def view(variable: Any) -> NDArray[Any]:
    """The variable's value, in its own memory where that lies on the host: good until the next update."""
    value, backend = variable.value, keras.backend.backend()
    if backend == "torch":
        return np.asarray(keras.ops.convert_to_numpy(value))
    # Not by Keras' own way: for JAX and TensorFlow that asks NumPy in a manner that it will refuse.
    array: NDArray[Any] = np.asarray(value.read_value() if backend == "tensorflow" else value)
    return array


def views(state: ModelState) -> dict[str, NDArray[Any]]:
    """Every variable's value by name: all that a replica is, but for what Python objects hold. Good until the
    next update: see `view`."""
    return {name: view(variable) for name, variable in state.named()}


def load_snapshot(state: ModelState, values: Mapping[str, NDArray[Any]], *, given_away: bool = False) -> None:
    """Gives every variable its value. Where they are `given_away`, the variables may live in the arrays'
    memory from now on. Raises CheckpointError, before anything is changed, where they differ from the model's
    variables."""
    check_snapshot(state, values)
    for name, variable in state.named():
        variable.assign(_as_tensor(values[name]) if given_away else values[name])


def _as_tensor(array: NDArray[Any]) -> Any:
    """What a variable takes as it is, where there is such a thing: TensorFlow would copy an array first, and
    once more on its way into the variable."""
    worthwhile = array.nbytes >= _WORTHWHILE and array.dtype.kind in "fiu" and array.flags.writeable
    if keras.backend.backend() != "tensorflow" or not worthwhile:
        return array
    from insitu.train.replica.tensorflow_memory import borrow

    return borrow(array)


def check_snapshot(state: ModelState, values: Mapping[str, NDArray[Any]]) -> None:
    """Raises CheckpointError where `values` are no snapshot of this model."""
    variables = dict(state.named())
    wrong = sorted(variables.keys() ^ values.keys())
    wrong += [n for n, v in variables.items() if n in values and tuple(v.shape) != values[n].shape]
    if wrong:
        raise CheckpointError(
            "The saved state belongs to another model: it must have the same variables of the same shapes. "
            f"Different: {', '.join(wrong[:5])}{' and more' if len(wrong) > 5 else ''}"
        )


def broadcast_state(state: ModelState, group: Group) -> None:
    """Gives every replica the variables of rank 0. Raises TrainingError where the models differ in size."""
    if group.size == 1:
        return
    own = views(state)
    sizes = gather_sizes(group, sum(value.nbytes for value in own.values()))
    if len(set(sizes)) != 1:
        raise TrainingError(
            "Every task must build the same model. Received: models of "
            f"{', '.join(f'{size:,}' for size in sizes)} bytes, by shard."
        )
    told = share(group, 0, own if group.rank == 0 else None)
    if group.rank != 0:
        load_snapshot(state, told, given_away=True)
