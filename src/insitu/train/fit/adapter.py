"""Gives a feed to Keras' own `fit`, `evaluate` and `predict`, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from insitu.errors import InputError
from insitu.grid import Dataset
from insitu.train.fit.feed import Feed, weigh_classes
from insitu.train.replica import SKIPPED, StepBatch


class _UnevenBatches(DataAdapter):
    """Leaves open what the last batch is like, which Keras asks: it may be of any size, in each shard."""

    @property
    def has_partial_batch(self) -> None:
        return None

    @property
    def partial_batch_size(self) -> None:
        return None


def _start_of_data() -> tuple[int, int]:
    return 0, 0


class FeedAdapter(_UnevenBatches):
    """Shows a feed to Keras, as an iterable of steps for the train function of a strategy.

    Each iteration asks `start` where it starts, as (epoch, step). With `steps_per_epoch` the feed repeats
    without end, and Keras' epochs cut it into pieces of that length.
    """

    def __init__(
        self,
        feed: Feed,
        steps_per_epoch: int | None = None,
        start: Callable[[], tuple[int, int]] = _start_of_data,
    ) -> None:
        self.feed = feed
        self.steps_per_epoch = steps_per_epoch
        self._start = start
        #: The feed's steps that come next; None where they are to be made, for the shards of now.
        self._iterator: Iterator[StepBatch] | None = None
        if steps_per_epoch and feed.num_steps is None:
            raise InputError(
                "steps_per_epoch needs data of known length. Received a dataset of unknown length. Leave "
                "steps_per_epoch out."
            )

    @property
    def num_batches(self) -> int | None:
        return None if self.steps_per_epoch else self.feed.num_steps

    def __iter__(self) -> Iterator[StepBatch]:
        # A generator, so that `start` is called when the first step is asked for: Keras makes the iterator of
        # the next epoch while this one is still under way.
        epoch, index = self._start()
        for _ in range(index):
            yield SKIPPED
        yield from self.steps(epoch, index)

    def steps(self, epoch: int, index: int) -> Iterator[StepBatch]:
        """Yield the steps of Keras' `epoch` from `index` on, each of the shards that this task then has."""
        self._iterator = None
        while True:
            if self._iterator is None:
                self._iterator = self._read(epoch, index)
            step = next(self._iterator, None)
            if step is None:
                return
            index += 1
            yield step

    def _read(self, epoch: int, index: int) -> Iterator[StepBatch]:
        """Yield the feed's steps from Keras' (`epoch`, `index`) on; without end where Keras cuts them."""
        data_epoch, step = self.data_position(epoch, index)
        yield from self.feed.steps(data_epoch, step)
        while self.steps_per_epoch:
            data_epoch += 1
            yield from self.feed.steps(data_epoch, 0)

    def data_position(self, epoch: int, index: int) -> tuple[int, int]:
        """Return the (epoch, step) of the data that the step `index` of Keras' `epoch` is."""
        if not self.steps_per_epoch:
            return epoch, index
        return divmod(epoch * self.steps_per_epoch + index, self.feed.num_steps or 1)

    def assign_shards(self, shards: Sequence[int]) -> None:
        """Read these shards from the next step on that is asked for."""
        self.feed.assign_shards(shards)
        self._iterator = None

    def step_at(self, epoch: int, index: int) -> StepBatch:
        """Return one step, of the shards that this task has now."""
        return next(self._read(epoch, index))

    def get_tf_dataset(self) -> FeedAdapter:
        return self

    def get_jax_iterator(self) -> FeedAdapter:
        return self

    def get_numpy_iterator(self) -> FeedAdapter:
        return self

    def get_torch_dataloader(self) -> FeedAdapter:
        return self

    @property
    def batch_size(self) -> None:
        return None


class DatasetAdapter(_UnevenBatches):
    """Gives a model that no strategy holds this process' rows of an `insitu.Dataset`, as plain batches."""

    def __init__(self, dataset: Dataset, class_weight: dict[int, float] | None = None) -> None:
        self._dataset = dataset
        self._class_weight = class_weight

    def get_numpy_iterator(self) -> Iterator[Any]:
        for batch in self._dataset:
            yield weigh_classes(batch, self._class_weight) if self._class_weight else batch

    def get_jax_iterator(self) -> Iterator[Any]:
        return self.get_numpy_iterator()

    def get_tf_dataset(self) -> Any:
        return _Repeatable(self.get_numpy_iterator)

    def get_torch_dataloader(self) -> Any:
        return _Repeatable(self._torch_batches)

    def _torch_batches(self) -> Iterator[Any]:
        import torch

        for batch in self.get_numpy_iterator():
            # Torch has no read-only tensors: rows that lie in a partition's file are copied.
            yield keras.tree.map_structure(
                lambda leaf: torch.from_numpy(np.require(leaf, requirements="W")), batch
            )

    @property
    def num_batches(self) -> int:
        return self._dataset.num_steps

    @property
    def batch_size(self) -> int:
        return int(self._dataset.batch_size)


class _Repeatable:
    """Calls a generator function again for each iteration."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def register_dataset_adapter() -> None:
    """Let `fit`, `evaluate` and `predict` of every model take an `insitu.Dataset`. Done once."""
    original = data_adapters.get_data_adapter
    if getattr(original, "knows_insitu", False):
        return

    def get_data_adapter(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Any:
        if not isinstance(x, Dataset):
            return original(x, y, sample_weight, **options)
        refuse_beside_dataset(y=y, sample_weight=sample_weight)
        return DatasetAdapter(x, options.get("class_weight"))

    get_data_adapter.knows_insitu = True  # type: ignore[attr-defined]
    data_adapters.get_data_adapter = get_data_adapter


def refuse_beside_dataset(**arguments: Any) -> None:
    """Raise InputError where `fit` got arguments that an `insitu.Dataset` already holds."""
    for name, value in arguments.items():
        if value is not None:
            raise InputError(
                f"An insitu.Dataset holds its own labels, weights and batch size: leave {name} out. "
                f"Received: {name} of type {type(value).__name__}."
            )
