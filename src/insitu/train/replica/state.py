"""The variables of a model, and how each is combined over shards. For every Keras backend."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import keras
import numpy as np
import xxhash
from numpy.typing import NDArray

from insitu.base.errors import CheckpointError, TrainingError
from insitu.base.wording import inflect
from insitu.exchange import Group
from insitu.train.backends import active_backend
from insitu.train.collectives import all_gather_json, broadcast_value, gather_sizes
from insitu.train.replica.combination import Operation

SEED_STRIDE = 0x9E3779B1
"""Distance of the shards' random streams: added to a seed generator's seed once per shard number. It is odd,
so that no two shards have the same seed modulo 2**32. Shard 0 keeps the plain seed, as without insitu."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """The variables of one model, each in exactly one list, in the order of Keras."""

    trainable: tuple[Any, ...]
    """Updated by the optimizer from the mean gradient. Rows that a batch has pulled out of tables on
    servers come last."""
    mean: tuple[Any, ...]
    """Floating state that the forward pass moves. After a step it is the mean over shards by rows."""
    seeds: tuple[Any, ...]
    """States of seed generators, `[seed, counter]`."""
    first: tuple[Any, ...]
    """Other state. After a step it is that of the first shard that had rows."""
    sums: tuple[Any, ...]
    """Metric variables that add up over rows, hence over shards."""
    metric_first: tuple[Any, ...]
    """Metric variables that don't add up; handled as `first`."""
    optimizer: tuple[Any, ...]
    """The optimizer's variables, equal on every replica, since all apply the same update."""
    combined: tuple[tuple[Any, Operation], ...] = ()
    """Other state that combines by an operation. Only a replica's own grouping has these, see `regroup`."""
    metric_combined: tuple[tuple[Any, Operation], ...] = ()
    """Metric variables that combine by an operation."""

    @property
    def moved_in_tests(self) -> tuple[Any, ...]:
        """Variables that a test step moves."""
        return (*self.seeds, *self.sums, *self.metric_first, *(v for v, _ in self.metric_combined))

    @property
    def moved(self) -> tuple[Any, ...]:
        """Variables that a training step moves before its update."""
        others = (*self.mean, *self.first, *(v for v, _ in self.combined))
        return (*others, *self.moved_in_tests)

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield every variable once, under a name that is the same in each run of the same script."""
        for group in ("trainable", "mean", "seeds", "first", "sums", "metric_first", "optimizer"):
            for index, variable in enumerate(getattr(self, group)):
                yield f"{group}/{index}", variable


def is_floating(variable: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(variable.dtype)


def read_state(model: Any) -> ModelState:
    """Sort the variables of a built and compiled `model`."""
    seeds = {id(generator.state): generator.state for generator in find_seed_generators(model)}
    optimizer = getattr(model, "optimizer", None)
    metrics = {id(v): v for v in model.metrics_variables}
    trainable = tuple(
        sorted((_unwrapped(v) for v in model.trainable_variables), key=lambda v: holds_table_rows(v))
    )
    mean: list[Any] = []
    first: list[Any] = []
    # A custom loop knows which variables its step only reads: those needn't travel.
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


def regroup(state: ModelState, operations: Mapping[int, Operation]) -> ModelState:
    """Return `state` with the variables whose id is in `operations` combined by those. Snapshots name
    variables by the groups of `read_state`, whatever a replica makes of them."""
    operations = {**_declared(state), **operations}

    def kept(variables: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(v for v in variables if id(v) not in operations)

    def taken(*groups: tuple[Any, ...]) -> tuple[tuple[Any, Operation], ...]:
        return tuple((v, operations[id(v)]) for group in groups for v in group if id(v) in operations)

    return replace(
        state,
        mean=kept(state.mean),
        first=kept(state.first),
        sums=kept(state.sums),
        metric_first=kept(state.metric_first),
        combined=taken(state.mean, state.first),
        metric_combined=taken(state.sums, state.metric_first),
    )


def _declared(state: ModelState) -> dict[int, Operation]:
    """Return the operations that `aggregation=` of add_weight or add_variable asks for, if the group of the
    variable doesn't do the same."""
    found = {}
    for variable in (*state.first, *state.metric_first):
        aggregation = getattr(variable, "aggregation", "none")
        if aggregation == "sum":
            found[id(variable)] = Operation.SUM_OF_CHANGES
        elif aggregation == "mean":
            found[id(variable)] = Operation.MEAN
    return found


def _unwrapped(variable: Any) -> Any:
    return variable.variable if hasattr(variable, "variable") else variable


def holds_table_rows(variable: Any) -> bool:
    """Return True if the variable holds rows that a batch pulled out of a table on parameter servers."""
    return bool(getattr(variable, "insitu_rows", False))


def find_seed_generators(model: Any) -> list[Any]:
    """Return the seed generators of the model's layers, each once."""
    found = {}
    for layer in model._flatten_layers():
        for generator in getattr(layer, "_seed_generators", ()):
            found[id(generator.state)] = generator
    return list(found.values())


def check_trainable_by_shards(model: Any, num_shards: int, *, exchanges_totals: bool = True) -> None:
    """Raise TrainingError if the mean over shards would differ from the user's loss. With
    `exchanges_totals`, shards know what the losses of the global batch divide by."""
    if num_shards == 1:
        return
    further = ("sum", "mean_with_sample_weight") if exchanges_totals else ()
    possible = ("sum_over_batch_size", "mean", *further)
    for loss in read_losses(model):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in possible:
            raise TrainingError(
                f"A loss over several shards must have a reduction out of {', '.join(possible)}. Received: "
                f"{getattr(loss, 'name', loss)!r} with {reduction!r}. Use the default, 'sum_over_batch_size'."
            )


def check_one_optimizer(model: Any, num_shards: int) -> None:
    """Raise TrainingError for a model with several optimizers, if gradients are combined over shards."""
    if num_shards == 1:
        return
    others = [
        name
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer
    ]
    if others:
        raise TrainingError(
            "Gradients are combined over shards only for the optimizer given to compile(). Received: further "
            f"optimizers in the model's attributes {', '.join(others)}. Train with them in a custom loop "
            "(strategy.run)."
        )


def read_losses(model: Any) -> list[Any]:
    """Return the losses that `model` was compiled with, one for each output that has one."""
    compiled = getattr(model, "_compile_loss", None)
    entries = getattr(compiled, "_flat_losses", None) or []
    return [entry.loss for entry in entries if entry is not None and entry.loss is not None]


def to_numpy(variable: Any) -> NDArray[Any]:
    """Return a copy of the variable's value as a NumPy array of its own dtype."""
    return np.array(view(variable))


def view(variable: Any) -> NDArray[Any]:
    """Return the variable's value, without a copy if it is on the host: valid until the next update."""
    return active_backend().view(variable)


def views(state: ModelState) -> dict[str, NDArray[Any]]:
    """Return every variable's value by name, valid until the next update: see `view`. This is a replica's
    whole state, without the attributes of Python objects."""
    return {name: view(variable) for name, variable in state.named()}


def load_snapshot(state: ModelState, values: Mapping[str, NDArray[Any]], *, donate: bool = False) -> None:
    """Set every variable to its value. With `donate` the variables may use the arrays' memory from now on.
    Raises CheckpointError, before anything is changed, if the values don't match the model's variables."""
    check_snapshot(state, values)
    lend = active_backend().lend
    for name, variable in state.named():
        variable.assign(lend(values[name]) if donate else values[name])


def load_weights(state: ModelState, values: Mapping[str, NDArray[Any]]) -> None:
    """Set what a model predicts by to its values in a snapshot: the weights, and state that the forward pass
    reads. Optimizer and metrics stay. Raises CheckpointError as `load_snapshot` does."""
    groups = ("trainable", "mean", "seeds", "first")
    predicts = ModelState(**{name: getattr(state, name) for name in groups}, **_NO_OTHERS)
    kept = {name: value for name, value in values.items() if name.partition("/")[0] in groups}
    load_snapshot(predicts, kept)


_NO_OTHERS: dict[str, tuple[Any, ...]] = {"sums": (), "metric_first": (), "optimizer": ()}


def check_snapshot(state: ModelState, values: Mapping[str, NDArray[Any]]) -> None:
    """Raise CheckpointError if `values` are no snapshot of this model."""
    variables = dict(state.named())
    wrong = sorted(variables.keys() ^ values.keys())
    wrong += [n for n, v in variables.items() if n in values and tuple(v.shape) != values[n].shape]
    if wrong:
        raise CheckpointError(
            "A saved state must have the model's variables, of the same shapes. Received: differences in "
            f"{', '.join(wrong[:5])}{' and more' if len(wrong) > 5 else ''}. Build the model that was saved, "
            "or use another directory."
        )


def broadcast_state(state: ModelState, group: Group, model: Any = None) -> None:
    """Give every replica the variables of rank 0. Raises TrainingError if the models differ in size, or
    look values up in different vocabularies."""
    if group.size == 1:
        return
    check_same_vocabularies(group, find_vocabularies(model))
    own = views(state)
    sizes = gather_sizes(group, sum(value.nbytes for value in own.values()))
    if len(set(sizes)) != 1:
        raise TrainingError(
            "Every task must build the same model. Received: models of "
            f"{', '.join(f'{size:,}' for size in sizes)} bytes, by shard. Let the model not depend on the "
            "task."
        )
    received = broadcast_value(group, 0, own if group.rank == 0 else None)
    if group.rank != 0:
        load_snapshot(state, received, donate=True)


# Finds tasks that look values up in different vocabularies: weights are compared, and don't show it.
#
# A vocabulary isn't a variable of its model. A file of it may differ between nodes, and then a word has
# another id on each: gradients are summed over rows of the wrong words


_MOST = 24
"""Vocabularies that are compared one by one, as many as a message has room for; the others count as one."""
_OTHERS = "other vocabularies"
_read_files: dict[str, str] = {}
"""A digest of a vocabulary's values by its file's path as it was given. Written by
`record_vocabulary_file`."""


def record_vocabulary_file(path: str, values: Iterable[str]) -> None:
    """Note that this process has read these values of a vocabulary, the last time, from a file."""
    _read_files[path] = xxhash.xxh3_64_hexdigest(json.dumps(list(values)).encode())


def find_vocabularies(model: Any) -> dict[str, str]:
    """Return a digest of each vocabulary that a model looks values up in, or that this task has read as a
    file, by a name. `model` may be None."""
    found = {f"the file {path}": digest for path, digest in _read_files.items()}
    kinds = (keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization)
    layers = model._flatten_layers(include_self=False) if isinstance(model, keras.Model) else ()
    for number, layer in enumerate(each for each in layers if isinstance(each, kinds)):
        words = json.dumps([str(word) for word in layer.get_vocabulary()])
        found[f"lookup layer {number}, {layer.name}"] = xxhash.xxh3_64_hexdigest(words.encode())
    return found


def check_same_vocabularies(group: Group, found: Mapping[str, str]) -> None:
    """Raise TrainingError, in all tasks of a group, if two have different vocabularies of one name.

    One that only some tasks have is theirs. Collective.
    """
    own = dict(sorted(found.items())[:_MOST])
    if len(found) > _MOST:
        rest = json.dumps(sorted(found.items())[_MOST:])
        own[_OTHERS] = xxhash.xxh3_64_hexdigest(rest.encode())
    names = {_shorten(name): name for name in own}
    answers = all_gather_json(group, {short: own[name] for short, name in names.items()})
    different = sorted({short for a in answers for short in a if _differs(short, answers)})
    if different:
        named = [names.get(short, "one that this task doesn't have") for short in different]
        ranks = [
            str(rank)
            for rank, a in enumerate(answers)
            if any(a.get(d) != answers[0].get(d) for d in different)
        ]
        refuse_vocabularies(
            named,
            f"{inflect(len(ranks), 'task', 'tasks')} {', '.join(ranks)} "
            f"{inflect(len(ranks), 'has', 'have')} another one than task 0",
        )


def refuse_vocabularies(names: Sequence[str], who: str) -> NoReturn:
    """Raise TrainingError for vocabularies of these names; `who` says which tasks differ."""
    raise TrainingError(
        f"All tasks look words up in the same vocabulary. Received: {'; '.join(names)}: {who}. Give all "
        "nodes the same file, or pass vocabulary_list"
    )


def check_saved_vocabularies(more: Any, model: Any) -> None:
    """Raise CheckpointError if `model`, or what `find_vocabularies` has found of it, has another
    vocabulary than the task that saved `more` beside its weights."""
    saved = more.get("vocabularies") if isinstance(more, Mapping) else None
    if not isinstance(saved, Mapping) or not saved:
        return
    own = model if isinstance(model, Mapping) else find_vocabularies(model)
    different = [name for name, digest in saved.items() if own.get(name, digest) != digest]
    if different:
        raise CheckpointError(
            "A checkpoint is read by a task that looks words up in the vocabulary that it was trained with. "
            f"Received: another one in {'; '.join(different)}. Give this task the same file or "
            "vocabulary_list, or use another directory"
        )


def _shorten(name: str) -> str:
    return xxhash.xxh3_64_hexdigest(name.encode())[:12]


def _differs(short: str, answers: list[dict[str, str]]) -> bool:
    return len({answer[short] for answer in answers if short in answer}) > 1
