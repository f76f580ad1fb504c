"""`insitu.layers`: layers whose variables may live on parameter servers.

Models are saved with the registered names `insitu>Embedding` and `insitu>KeyIndex`, which Keras finds once
`insitu.layers` has been loaded, whatever module path a file names.

Example:
    >>> layer = insitu.layers.Embedding(8, input_dim=1000)
    >>> tuple(layer(np.array([[1, 2, 3]])).shape)
    (1, 3, 8)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import keras
import numpy as np
from keras import ops
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.parameters import Eviction
from insitu.train.backends import active_backend
from insitu.train.fit import dispatch_methods
from insitu.train.replica import mark_loaded_table, to_numpy

INT32_MAX = 2**31 - 1


class EmbeddingStorage(Protocol):
    """The storage of an `Embedding`'s rows while it trains."""

    def pull(self, keys: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows of distinct `keys`, shape (keys, output_dim). Missing rows are created."""

    def read_all(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return (all keys in ascending order, their rows)."""

    def begin(self, keys: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Initialize a new table with these rows. A table that has begun stays as it is."""

    def assign(self, keys: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Set the rows of `keys`."""


@keras.saving.register_keras_serializable(package="insitu")
class KeyIndex(keras.layers.Layer):
    """Turns keys into row indices: 1 + the index of a key in the ascending `keys`, or 0 for an unknown
    one."""

    def __init__(self, keys: Any = (), **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "trainable": False})
        self.autocast = False
        self._keys = np.asarray(keys, np.int64)
        self.keys: Any = None

    def build(self, input_shape: Any = None) -> None:
        self.keys = _key_variable(self, self._keys)
        self.built = True

    def call(self, inputs: Any) -> Any:
        index, found = _find(self.keys, inputs)
        return ops.where(found, index + 1, 0)

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(inputs.shape, dtype="int32")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "keys": self._keys.tolist() if self._keys.size <= 1000 else []}

    def save_own_variables(self, store: Any) -> None:
        store["keys"] = self._keys

    def load_own_variables(self, store: Any) -> None:
        self._keys = np.asarray(store["keys"], np.int64)
        with _unlocked(self):
            if self.keys is not None:
                self._untrack_variable(self.keys)
            self.keys = _key_variable(self, self._keys)


@keras.saving.register_keras_serializable(package="insitu")
class Embedding(keras.layers.Layer):
    """Turns integer keys into rows of a table that needs no size: a row is made when its key is first seen.

    Under a `ParameterServerStrategy` only the servers have the table. A batch pulls the distinct rows
    that it uses and pushes their gradients; the servers update row by row. Elsewhere the layer looks keys up
    in the table that it was saved with, or, with `input_dim`, is a plain embedding.

    A loaded table is trained on without servers, too: the rows that it has, by an optimizer without a state.

    Input: integers of any shape. Output: that shape with `output_dim` behind it. A key that a saved table
    doesn't have gives zeros.

    Args:
        output_dim: length of a row.
        embeddings_initializer: `"uniform"` (in [-0.05, 0.05)), `"normal"` (deviation 0.05), `"zeros"`, or a
            Keras initializer of these kinds. A new row depends on the seed and its key alone.
        input_dim: the number of keys, [0, input_dim), for use without servers; not needed with them.
        max_keys: the most keys in one shard's batch; None: those of the first batch, by its shape.
        eviction: which rows go, on servers: see `insitu.parameters.Eviction`, such as
            `{"max_age": 10_000, "min_count": 3}`. A row that went starts over when its key comes again.
        feature: which input of the model the keys come from, by name; found out for functional models.
    """

    def __init__(
        self,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        *,
        input_dim: int | None = None,
        max_keys: int | None = None,
        eviction: Mapping[str, int] | None = None,
        feature: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, value in (("output_dim", output_dim), ("input_dim", input_dim), ("max_keys", max_keys)):
            if value is not None and value < 1:
                raise TrainingError(f"{name} of an Embedding must be at least 1. Received: {value}")
        self.autocast = False
        self.output_dim, self.input_dim, self.max_keys = output_dim, input_dim, max_keys
        self.eviction, self.feature = _check_eviction(eviction), feature
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.rows: Any = None
        self.keys: Any = None
        #: The ascending keys of a loaded table, whose rows are in `rows` until servers have them.
        self._loaded_keys: NDArray[np.int64] | None = None
        self._by_row_index = False
        # Around Keras' tracking: the table is no part of the layer's state.
        object.__setattr__(self, "_table", None)

    # Called by Keras

    def build(self, input_shape: Any = None) -> None:
        if self.input_dim is not None and self.rows is None and self._loaded_keys is None:
            self.rows = self.add_weight(
                shape=(self.input_dim, self.output_dim), initializer=self.embeddings_initializer, name="rows"
            )
        self.built = True

    def call(self, inputs: Any) -> Any:
        if self._table is not None and in_symbolic_scope():
            return ops.zeros((*inputs.shape, self.output_dim), self.compute_dtype)
        if self._by_row_index or (self.rows is not None and self.keys is None and self._table is None):
            return self._take(self.rows, ops.cast(inputs, "int32"))
        if self._table is not None:
            return self._look_up_now(inputs)
        if self.keys is None:
            raise TrainingError(
                f"The Embedding {self.name!r} has no table: compile its model in the scope of a "
                "ParameterServerStrategy and fit it, load a saved one, or give input_dim. Received: a call "
                "without any of them."
            )
        index, found = _find(self.keys, inputs)
        return ops.where(found[..., None], self._take(self.rows, index), 0)

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor((*inputs.shape, self.output_dim), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "input_dim": self.input_dim,
            "max_keys": self.max_keys,
            "eviction": self.eviction,
            "feature": self.feature,
        }

    def save_own_variables(self, store: Any) -> None:
        keys, rows = self.contents()
        if keys is not None:
            store["keys"] = keys
        store["rows"] = rows

    def load_own_variables(self, store: Any) -> None:
        rows = np.asarray(store["rows"])
        if "keys" not in store:
            self.rows.assign(rows)
            return
        keys = np.asarray(store["keys"], np.int64)
        if self._table is not None:
            self._table.assign(keys, rows)
            return
        self._loaded_keys = keys
        self._keep_table(keys, rows)

    # Called by a strategy

    def attach(self, table: EmbeddingStorage, max_keys: int) -> None:
        """Take the rows from `table` from now on. `rows` holds those of one batch."""
        loaded = None if self._loaded_keys is None else (self._loaded_keys, self._loaded_rows())
        with _unlocked(self):
            for variable in (self.rows, self.keys):
                if variable is not None:
                    self._untrack_variable(variable)
            self.keys = None
            self.rows = self.add_weight(
                shape=(self.max_keys or max_keys, self.output_dim), initializer="zeros", name="rows"
            )
        self.rows.insitu_rows = True
        object.__setattr__(self, "_table", table)
        if loaded is not None:
            table.begin(*loaded)
            self._loaded_keys = None

    @contextlib.contextmanager
    def by_row_index(self) -> Iterator[None]:
        """While open, inputs are indices of `rows`, not keys."""
        before, self._by_row_index = self._by_row_index, True
        try:
            yield
        finally:
            self._by_row_index = before

    def contents(self) -> tuple[NDArray[np.int64] | None, NDArray[Any]]:
        """Return (keys in ascending order, their rows). Keys are None for a plain embedding."""
        table: EmbeddingStorage | None = self._table
        if table is not None:
            return table.read_all()
        if self._loaded_keys is not None:
            return self._loaded_keys, self._loaded_rows()
        if self.rows is None:
            return np.empty(0, np.int64), np.empty((0, self.output_dim), np.float32)
        return None, to_numpy(self.rows)

    # Helpers

    def _loaded_rows(self) -> NDArray[Any]:
        return to_numpy(self.rows)[: 0 if self._loaded_keys is None else len(self._loaded_keys)]

    def _take(self, rows: Any, indices: Any) -> Any:
        return ops.cast(ops.take(rows, indices, axis=0), self.compute_dtype)

    def _look_up_now(self, inputs: Any) -> Any:
        try:
            keys = np.asarray(ops.convert_to_numpy(inputs)).astype(np.int64)
        except Exception as error:
            raise TrainingError(
                f"The Embedding {self.name!r} has its table on servers: inside a compiled function it can be "
                "called by fit, evaluate and predict of its model alone. Received: another function."
            ) from error
        distinct, indices = np.unique(keys, return_inverse=True)
        rows = self._table.pull(distinct)[indices.reshape(keys.shape)]
        return ops.cast(ops.convert_to_tensor(rows), self.compute_dtype)

    def _keep_table(self, keys: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Keep a whole table in variables, for a process without servers."""
        with _unlocked(self):
            for variable in (self.rows, self.keys):
                if variable is not None:
                    self._untrack_variable(variable)
            self.keys = _key_variable(self, keys)
            self.rows = self.add_weight(
                shape=(max(1, len(rows)), self.output_dim), initializer="zeros", name="rows"
            )
        mark_loaded_table(self.rows)
        dispatch_methods()  # also without a strategy: see `renew_optimizer`
        if len(rows):
            self.rows.assign(rows)


def export(model: Any) -> Any:
    """Return `model` with each `Embedding` replaced by a `KeyIndex` and a plain `keras.layers.Embedding`,
    whose row 0 serves unknown keys: zeros. For functional and sequential models. The weights are copies."""
    replaced: dict[str, NDArray[Any]] = {}

    def clone(layer: Any) -> Any:
        if not isinstance(layer, Embedding):
            return layer.__class__.from_config(layer.get_config())
        keys, rows = layer.contents()
        if keys is None:
            keys = np.arange(len(rows))
        table = np.concatenate([np.zeros((1, layer.output_dim), rows.dtype), rows])
        plain = keras.layers.Embedding(len(table), layer.output_dim, name=f"{layer.name}_rows")
        replaced[layer.name] = table
        given = keras.Input(layer.input.shape[1:], dtype="int64")
        return keras.Sequential([given, KeyIndex(keys, name=f"{layer.name}_keys"), plain], name=layer.name)

    plain = keras.models.clone_model(model, clone_function=clone)
    for layer, source in zip(plain.layers, model.layers, strict=True):
        if layer.name in replaced:
            layer.layers[-1].set_weights([replaced[layer.name]])
        else:
            layer.set_weights(source.get_weights())
    return plain


def embeddings_of(model: Any) -> list[Embedding]:
    """Return the insitu Embeddings anywhere in `model`, in the order of its layers."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, Embedding)]


def _check_eviction(given: Any) -> dict[str, int] | None:
    """Return the eviction as a dict, or None. Raises TrainingError for anything but a dict of its fields,
    InputError for values out of range."""
    if not given:
        return None
    known = [field.name for field in dataclasses.fields(Eviction)]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise TrainingError(f"eviction of an Embedding is a dict of {', '.join(known)}. Received: {given!r}")
    Eviction(**given)
    return dict(given)


def _key_variable(layer: Any, keys: NDArray[np.int64]) -> Any:
    """Return a variable of the ascending `keys`. Raises TrainingError if the backend can't hold them."""
    if not len(keys):
        keys = np.zeros(1, np.int64)
    wide = active_backend().has_wide_integers
    if not wide and (keys[-1] > INT32_MAX or keys[0] < -INT32_MAX - 1):
        raise TrainingError(
            "JAX has integers of 32 bits by default: a table that is looked up without servers must have "
            f"keys in [-2**31, 2**31). Received: {keys[0]} to {keys[-1]}. Use TensorFlow or PyTorch."
        )
    variable = layer.add_weight(
        shape=keys.shape,
        initializer="zeros",
        trainable=False,
        dtype="int64" if wide else "int32",
        name="keys",
    )
    variable.assign(keys)
    return variable


def _find(keys: Any, inputs: Any) -> tuple[Any, Any]:
    """Return (index of each input among the ascending `keys`, True where it is one of them)."""
    keys_of_inputs = ops.cast(inputs, keys.dtype)
    flat = ops.reshape(keys_of_inputs, (-1,))
    index = ops.minimum(ops.searchsorted(keys.value, flat), keys.shape[0] - 1)
    index = ops.cast(ops.reshape(index, ops.shape(keys_of_inputs)), "int32")
    return index, ops.equal(ops.take(keys.value, index, axis=0), keys_of_inputs)


@contextlib.contextmanager
def _unlocked(layer: Any) -> Iterator[None]:
    """While open, variables may be added to a layer that is built."""
    locked = layer._tracker.locked_by_default if hasattr(layer._tracker, "locked_by_default") else True
    layer._tracker.unlock()
    try:
        yield
    finally:
        if locked:
            layer._tracker.lock()
