"""Find the keys of a batch, pull their rows, and replace the keys by row indices.

The i-th distinct key of a batch gets index i, and row i of the layer's `rows` holds the row that was pulled
for it. So the compiled step is that of a plain embedding with the size of one batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import InputError, TrainingError
from insitu.train.collectives import pack_leaves
from insitu.train.parameter_server.layers import Embedding

Keys = NDArray[np.int64]


class RowSource(Protocol):
    """Tables by name, wherever they are."""

    def pull_rows(self, table: str, keys: Keys, *, create: bool) -> NDArray[Any]:
        """Return the rows of distinct `keys`. A missing row is created with `create`; else its initial value
        is returned."""


@dataclass(frozen=True, slots=True)
class PulledRows:
    """The rows of one layer for one batch."""

    layer: Embedding
    """The layer whose table they come from."""
    keys: Keys
    """The distinct keys of the batch, ascending."""
    rows: NDArray[Any]
    """The row of each key, in that order."""


@dataclass(frozen=True, slots=True)
class IndexedBatch:
    """A batch with row indices instead of keys."""

    data: Any
    """The structure of the batch, with indices in place of keys."""
    pulled: tuple[PulledRows, ...] = ()
    """The rows that the indices stand for, by layer."""


class TableLookup:
    """The tables of one model. `leaves[i]` are the numbers of the batch's leaves that layer i reads."""

    def __init__(
        self, source: RowSource, layers: Sequence[Embedding], leaves: Sequence[tuple[int, ...]]
    ) -> None:
        self._source = source
        self._tables = tuple(zip(layers, leaves, strict=True))

    def pull(self, data: Any, *, create: bool = True) -> IndexedBatch:
        """Return `data` with row indices, and the rows of all its keys. Raises InputError for keys that
        aren't integers, TrainingError for more than a batch may have."""
        if not self._tables:
            return IndexedBatch(data)
        arrays = [np.asarray(leaf) for leaf in keras.tree.flatten(data)]
        replaced = list(arrays)
        pulled = []
        for layer, leaves in self._tables:
            keys, indices = np.unique(
                np.concatenate([_as_keys(layer, arrays[leaf]).reshape(-1) for leaf in leaves]),
                return_inverse=True,
            )
            if len(keys) > layer.rows.shape[0]:
                raise TrainingError(
                    f"The Embedding {layer.name!r} has room for {layer.rows.shape[0]} keys in a shard's "
                    f"batch, as many as the first batch had. Received: {len(keys)} distinct keys. Pass "
                    "max_keys=... to the layer."
                )
            start = 0
            for leaf in leaves:
                size = arrays[leaf].size
                replaced[leaf] = indices[start : start + size].reshape(arrays[leaf].shape).astype(np.int32)
                start += size
            rows = self._source.pull_rows(layer.name, keys, create=create)
            pulled.append(PulledRows(layer, keys, rows))
        return IndexedBatch(pack_leaves(data, replaced), tuple(pulled))

    @contextlib.contextmanager
    def rows_loaded(self, batch: IndexedBatch) -> Iterator[None]:
        """While open, the layers hold the rows of `batch` and read row indices."""
        with contextlib.ExitStack() as stack:
            for one in batch.pulled:
                shape = tuple(one.layer.rows.shape)
                rows = np.zeros(shape, one.rows.dtype)
                rows[: len(one.rows)] = one.rows
                one.layer.rows.assign(rows)
                stack.enter_context(one.layer.by_row_index())
            yield

    @contextlib.contextmanager
    def by_row_index(self) -> Iterator[None]:
        """While open, the layers read row indices, of whatever rows they hold."""
        with contextlib.ExitStack() as stack:
            for layer, _ in self._tables:
                stack.enter_context(layer.by_row_index())
            yield

    def pieces(self, data: Any) -> Iterator[Any]:
        """Split `data` by rows into batches whose keys the layers have room for."""
        leaves = keras.tree.flatten(data)
        rows = len(leaves[0])
        size = rows
        for layer, numbers in self._tables:
            keys_of_row = sum(int(np.prod(leaves[n].shape[1:])) for n in numbers)
            size = min(size, max(1, layer.rows.shape[0] // max(1, keys_of_row)))
        for start in range(0, rows, max(1, size)):
            if size >= rows:
                yield data
            else:
                part = slice(start, start + size)
                yield keras.tree.map_structure(lambda leaf, part=part: leaf[part], data)

    def example(self, data: Any) -> Any:
        """Return `data` as `pull` would, without pulling."""
        leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(data)]
        for _, numbers in self._tables:
            for number in numbers:
                leaves[number] = np.zeros(leaves[number].shape, np.int32)
        return pack_leaves(data, leaves)


def _as_keys(layer: Embedding, leaf: NDArray[Any]) -> Keys:
    if leaf.dtype.kind in "iu":
        if leaf.dtype == np.uint64 and leaf.size and leaf.max() >= 2**63:
            raise InputError(
                f"Keys of the Embedding {layer.name!r} must be int64, in [-2**63, 2**63). "
                f"Received: {int(leaf.max())}"
            )
        return leaf.astype(np.int64)
    if (
        leaf.dtype.kind == "f"
        and np.array_equal(leaf, np.trunc(leaf))
        and np.abs(leaf).max(initial=0) < 2**53
    ):
        return leaf.astype(np.int64)
    raise InputError(
        f"Keys of the Embedding {layer.name!r} must be integers in [-2**63, 2**63). Received: values of "
        f"dtype {leaf.dtype.name}."
    )


def find_key_inputs(model: Any, layers: Sequence[Embedding], example: Any) -> list[tuple[int, ...]]:
    """Return the leaves of a batch like `example` from which each layer reads its keys.

    Raises TrainingError if a layer's keys aren't an input of the model, or something else reads it too.
    """
    numbers = pack_leaves(example, list(range(len(keras.tree.flatten(example)))))
    x = keras.utils.unpack_x_y_sample_weight(numbers)[0]
    found = [tuple(sorted(set(_leaves_of(model, layer, x)))) for layer in layers]
    owners: dict[int, tuple[int, ...]] = {}
    for layer, leaves in zip(layers, found, strict=True):
        if not leaves:
            raise TrainingError(
                f"The Embedding {layer.name!r} must take its keys from an input of the model, so that they "
                "are known before a step. Received: a model in which no input leads there directly. Compute "
                "the keys in the dataset (.map), or name the input: Embedding(feature=...)."
            )
        for leaf in leaves:
            if owners.setdefault(leaf, leaves) != leaves:
                raise TrainingError(
                    f"Embeddings that read the same input must read the same inputs. Received: "
                    f"{layer.name!r}, which shares one of several. Give it an input of its own."
                )
    return found


def _leaves_of(model: Any, layer: Embedding, x: Any) -> list[int]:
    if layer.feature is not None:
        if not isinstance(x, dict) or layer.feature not in x:
            raise TrainingError(
                f"Embedding(feature={layer.feature!r}) needs batches with an input of that name. Received: "
                f"{sorted(x) if isinstance(x, dict) else 'inputs without names'}."
            )
        return [x[layer.feature]]
    functional = getattr(model, "_functional", None) or model
    if not hasattr(functional, "_nodes_by_depth"):
        return []
    inputs = {id(tensor): index for index, tensor in enumerate(keras.tree.flatten(functional._inputs))}
    found = []
    for node in _nodes(functional):
        if node.operation is not layer:
            continue
        for tensor in node.input_tensors:
            if id(tensor) not in inputs:
                return []
            _check_readers(functional, layer, tensor)
            found.append(_leaf(x, functional, tensor, inputs[id(tensor)]))
    return found


def _nodes(functional: Any) -> Iterator[Any]:
    for nodes in functional._nodes_by_depth.values():
        yield from nodes


def _check_readers(functional: Any, layer: Embedding, tensor: Any) -> None:
    for node in _nodes(functional):
        reads = any(other is tensor for other in node.input_tensors)
        if reads and not isinstance(node.operation, Embedding):
            raise TrainingError(
                f"An input with the keys of the Embedding {layer.name!r} is for Embeddings alone, since a "
                "step replaces them by row indices. Received: a model in which "
                f"{node.operation.name!r} reads it too. Give that an input of its own."
            )


def _leaf(x: Any, functional: Any, tensor: Any, index: int) -> int:
    if isinstance(x, dict):
        name = tensor._keras_history.operation.name
        if name not in x:
            raise TrainingError(f"The model's input {name!r} must be in each batch. Received: {sorted(x)}")
        return int(x[name])
    return int(keras.tree.flatten(x)[index])
