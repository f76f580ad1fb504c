"""Cuts arrays into global batches, each epoch in an order of its own when shuffled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import keras
import numpy as np
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.utils.rng_utils import get_random_seed
from numpy.typing import NDArray

from insitu.base.errors import InputError
from insitu.train.fit.streams import Reader, Source
from insitu.train.replica import map_batch

_SPARSE = (
    array_slicing.TensorflowSparseSliceable,
    array_slicing.JaxSparseSliceable,
    array_slicing.ScipySparseSliceable,
)
_FITS_ATTRIBUTE = "_insitu_fits"
"""The attribute of a model that counts its fits."""
Shuffle = Literal["batch"] | bool
"""Keras' values of `shuffle`: "batch" draws an order of rows within each batch."""


@dataclass(frozen=True, slots=True)
class DrawnOrder:
    """Draws the order of a fit's epochs: a pure function of these seeds and the number of the epoch."""

    #: The seed of all randomness of the job.
    seed: int = 0
    #: Number of the fit among those of its model.
    fit: int = 0
    #: The seed that the script gave to `keras.utils.set_random_seed`, plus 1; 0 without.
    script_seed: int = field(default_factory=lambda: _script_seed())

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The seeds."""
        return self.seed, self.script_seed, self.fit

    def generator(self, epoch: int) -> np.random.Generator:
        """Return the generator of an epoch's order."""
        words = [number & 0xFFFFFFFFFFFFFFFF for number in (*self.numbers, epoch)]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def _script_seed() -> int:
    seed = get_random_seed()
    return 0 if seed is None else int(seed) + 1


def count_fit_of(model: Any) -> int:
    """Return the number of this fit among those of the model, from 0: what draws the order of arrays."""
    number = getattr(model, _FITS_ATTRIBUTE, 0)
    # Around Keras' tracking: this is no part of the model's state.
    object.__setattr__(model, _FITS_ATTRIBUTE, number + 1)
    return int(number)


class ArraySource(Source):
    """Global batches of arrays of equal length.

    `data` is a structure of what `to_rows` returns.
    """

    restartable = True

    def __init__(
        self, data: Any, batch_size: int, shuffle: Shuffle = False, order: DrawnOrder | None = None
    ) -> None:
        self.data = data
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._order = order or DrawnOrder()
        self.rows = count_array_rows(data)

    @property
    def leaves(self) -> list[Any]:
        """The arrays."""
        return [leaf for leaf in keras.tree.flatten(self.data) if leaf is not None]

    @property
    def order_numbers(self) -> tuple[int, ...]:
        """All that the order of rows follows from."""
        kinds: tuple[Shuffle, ...] = (False, True, "batch")
        drawn = self._order.numbers if self._shuffle else ()
        return self.batch_size, kinds.index(self._shuffle), *drawn

    @property
    def num_steps(self) -> int:
        return -(-self.rows // self.batch_size)

    def peek(self) -> Any:
        return self._take(slice(0, self.batch_size))

    def begin(self) -> Reader:
        return self.batches

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the global batches of an epoch from a step on."""
        for rows in self._rows_of_batches(epoch, start):
            yield self._take(rows)

    def _rows_of_batches(self, epoch: int, start: int) -> Iterator[slice | NDArray[Any]]:
        size, first = self.batch_size, start * self.batch_size
        if not self._shuffle:
            for begin in range(first, self.rows, size):
                yield slice(begin, min(begin + size, self.rows))
        elif self._shuffle == "batch":
            generator = self._order.generator(epoch)
            for begin in range(0, self.rows, size):
                drawn = generator.permutation(min(size, self.rows - begin))
                if begin >= first:
                    yield begin + drawn
        else:
            order = self._order.generator(epoch).permutation(self.rows)
            for begin in range(first, self.rows, size):
                yield order[begin : begin + size]

    def _take(self, rows: slice | NDArray[Any]) -> Any:
        return map_batch(partial(_take, rows), self.data)


def _take(rows: slice | NDArray[Any], leaf: Any) -> NDArray[Any]:
    array: NDArray[Any] = leaf[rows]
    return array


class SparseRows:
    """Rows of a sparse matrix, which are dense in a batch: each layer takes those."""

    def __init__(self, matrix: Any, sliceable: Any) -> None:
        self.shape = tuple(int(size) for size in matrix.shape)
        self.dtype = matrix.dtype
        self._sliceable = sliceable

    def __getitem__(self, rows: slice | NDArray[Any]) -> NDArray[Any]:
        return np.asarray(self._sliceable.convert_to_numpy(self._sliceable[rows]))


def count_array_rows(data: Any) -> int:
    """Return the number of rows of each array. Raises InputError if these differ or there are none."""
    lengths = {int(leaf.shape[0]) for leaf in keras.tree.flatten(data) if leaf is not None}
    if len(lengths) != 1 or not lengths.isdisjoint({0}):
        raise InputError(
            f"All arrays must have the same number of rows, at least one. Received: {sorted(lengths)} rows."
        )
    return lengths.pop()


def to_rows(part: Any) -> Any:
    """Return what the user gave as arrays that can be cut by rows: NumPy arrays, and `SparseRows`. None
    stays, and floats become `keras.config.floatx()`, as in Keras. Raises InputError for ragged tensors."""
    return keras.tree.map_structure(_to_sliceable, part)


def _to_sliceable(leaf: Any) -> Any:
    if leaf is None:
        return None
    if data_adapter_utils.is_tensorflow_ragged(leaf):
        refuse_ragged()
    if data_adapter_utils.is_torch_tensor(leaf):
        leaf = leaf.detach().cpu()
    sliceable = array_slicing.convert_to_sliceable(leaf, target_backend="jax")
    if isinstance(sliceable, _SPARSE):
        return SparseRows(leaf, sliceable)
    array = sliceable.array
    return np.asarray(array if isinstance(array, np.ndarray) else sliceable.convert_to_numpy(array))


def refuse_ragged() -> None:
    """Raise InputError: a replica takes its rows of arrays."""
    raise InputError(
        "Several replicas take their rows of dense or sparse arrays. Received: a tf.RaggedTensor. Convert it "
        "with to_tensor(), and mask what it fills up."
    )


def default_batch_size(rows: int, steps: int | None) -> int:
    """Return the size of the global batch if `fit` was given none: Keras' own."""
    return -(-rows // steps) if steps else 32
