"""Gives a feed to Keras' own `fit`, `evaluate` and `predict`, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from insitu.base.errors import InputError, TrainingError
from insitu.base.measure.time_account import ACCOUNT, CALLBACKS, DATA
from insitu.grid import Dataset, PositionedData
from insitu.train.fit.epoch_lengths import EpochLengths
from insitu.train.fit.feed import Feed, StepReader, weigh_classes
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

    Keras' own `EpochIterator` cuts it into epochs, so that `steps_per_epoch` and `steps_per_execution` mean
    what they mean without a strategy: an iteration of the data continues over several epochs of Keras', and
    is followed by another when the data ends. `start` returns the position of training, as (epoch, step).
    """

    def __init__(
        self,
        feed: Feed,
        steps_per_epoch: int | None = None,
        start: Callable[[], tuple[int, int]] = _start_of_data,
        *,
        initial_epoch: int = 0,
        steps_per_execution: int = 1,
    ) -> None:
        if feed.is_refreshed and steps_per_epoch:
            raise InputError(
                f"With --refresh an epoch is a pass over all rows. Received: epochs of {steps_per_epoch} "
                f"steps. Leave their number out"
            )
        self.feed = feed
        self.steps_per_epoch = steps_per_epoch
        self._start = start
        self._initial_epoch = initial_epoch
        #: Steps by which an epoch of Keras' advances in the data: whole executions.
        self._stride = -(-(steps_per_epoch or 0) // steps_per_execution) * steps_per_execution
        #: Keras' iterator over the feed. Written by `attach`.
        self._iterator: EpochIterator | None = None
        #: Keras' epoch that was entered last; None before the first. Written by `on_epoch_begin`.
        self._epoch: int | None = None
        #: The epoch of the data that is read in it, and the steps that earlier epochs of Keras' did of that.
        self._place = (initial_epoch - 1, 0)
        #: The length of the data that Keras knew when it entered that epoch; else 0. Written there too.
        self._length = 0
        #: The number of the iteration that the epoch entered last began in; None until it begins one. Written
        #: by `on_epoch_begin` and `__iter__`.
        self._iteration: int | None = None
        #: The iterations before it of which steps were read. Written by `on_epoch_begin`.
        self._entered = 0
        #: How often Keras has said that an epoch begins, and that it ends. Written there too.
        self._events = [0, 0]
        #: The `state_dict()` of another process, until its place is entered.
        self._loaded: dict[str, int] | None = None

    @property
    def num_batches(self) -> int | None:
        return self.feed.num_steps

    @property
    def epoch_lengths(self) -> EpochLengths:
        """The steps of Keras' epochs, as far as they are known."""
        return EpochLengths(self.feed.num_steps, self._stride)

    # Keras' iterator reports epochs

    def attach(self, iterator: EpochIterator) -> None:
        """Let `iterator` be Keras' iterator over the feed. Called when that is reset."""
        self._iterator = iterator

    def on_epoch_begin(self) -> None:
        self._events[0] += 1
        epoch, _ = self._start()
        is_first, source = self._epoch is None, self.feed.source
        if is_first and self._loaded is not None and self._iterator is not None:
            # Keras learns the length of some data at its end, and begins the next iteration earlier then.
            self._iterator._num_batches = self._loaded["length"] or self.num_batches
        if is_first and epoch > self._initial_epoch:
            source.replay_epochs(epoch - self._initial_epoch)
        self._place = self._find_place(epoch)
        self._epoch = epoch
        self._length = self._learned_length
        # Keras may have made the iterator at the end of the epoch before.
        has_begun = self._place[1] or source.eager
        self._iteration = source.begun - bool(has_begun) if self._goes_on else None
        self._entered = source.entered - bool(self._place[1])
        source.begin_epoch(self._place[0])
        if self.feed.is_refreshed and self._iterator is not None:
            ACCOUNT.enter(DATA)  # this may read the rows
            self._iterator._num_batches = self.feed.count_steps(self._place[0])
            ACCOUNT.enter(CALLBACKS)
        if is_first and self._place[1] and self._iterator is not None:
            # Another process has begun the iteration, which continues over several epochs.
            self._iterator._current_iterator = iter(self)
            self._iterator._steps_seen = self._place[1]

    def on_epoch_end(self) -> None:
        self._events[1] += 1
        self.feed.source.end_epoch()

    def _find_place(self, epoch: int) -> tuple[int, int]:
        """Return the epoch of the data that Keras' `epoch` begins in, and the steps before it."""
        if not self.steps_per_epoch:
            return epoch, 0
        whole = self.feed.num_steps
        if whole:
            data_epochs, part = divmod(epoch - self._initial_epoch, -(-whole // self._stride))
            return self._initial_epoch + data_epochs, part * self._stride
        if self._loaded is not None and self._loaded["epoch"] == epoch:
            return self._loaded["data_epoch"], self._loaded["done"]
        if epoch == self._epoch:
            return self._place
        return self._next_place()

    def _next_place(self) -> tuple[int, int]:
        done = self._iterator._steps_seen if self._iterator is not None and self._goes_on else 0
        return self._place[0] + (0 if done else 1), done

    @property
    def _goes_on(self) -> bool:
        """Whether Keras continues an iteration in its next epoch."""
        iterator = self._iterator
        return bool(self.steps_per_epoch) and iterator is not None and iterator._current_iterator is not None

    # Steps

    def __iter__(self) -> Iterator[StepBatch]:
        source, loaded = self.feed.source, self._loaded
        if loaded is not None:
            self._loaded = None
            source.skip(loaded["iterations"] - source.begun, loaded.get("entered"))
        if self._iteration is None:
            self._iteration = source.begun
        # Some data draws its order here, as without a strategy. The position of training is asked for later:
        # Keras makes the iterator of the next epoch while this one is still under way.
        return self._read(self.feed.begin())

    def _read(self, read: StepReader) -> Iterator[StepBatch]:
        epoch, index = self._start()
        # Before the skipped steps: the next epoch may have begun behind them.
        place = self.data_position(epoch, index)
        for _ in range(index):
            yield SKIPPED
        ACCOUNT.enter(DATA)
        for step in read(*place):
            ACCOUNT.enter(CALLBACKS)
            yield step
            ACCOUNT.enter(DATA)
        ACCOUNT.enter(CALLBACKS)

    def steps(self, epoch: int, index: int) -> Iterator[StepBatch]:
        """Yield the steps of an epoch of the data from `index` on, in an iteration of their own."""
        return self.feed.steps(epoch, index)

    def data_position(self, epoch: int, index: int) -> tuple[int, int]:
        """Return the (epoch, step) of the data that the step `index` of Keras' `epoch` is."""
        data_epoch, done = self._find_place(epoch)
        return data_epoch, done + index

    def ends_with(self, epoch: int) -> bool:
        """Return whether the data ends with Keras' `epoch`, which is over."""
        return self.data_position(epoch + 1, 0)[1] == 0

    def assign_shards(self, shards: Sequence[int]) -> None:
        """Read these shards from the next step on that is asked for."""
        self.feed.assign_shards(shards)

    def step_at(self, epoch: int, index: int) -> StepBatch:
        """Return one step, of the shards that this task has now."""
        return self.feed.step_at(*self.data_position(epoch, index))

    # Another process continues

    def state_dict(self, epoch: int) -> dict[str, int]:
        """Return the position of the data in Keras' `epoch`: the one under way or, between two, the next."""
        begun = self.feed.source.begun
        if epoch == self._epoch:
            (data_epoch, done), over = self._place, begun - 1 if self._iteration is None else self._iteration
            entered = self._entered
        else:
            data_epoch, done = self._next_place()
            has_begun = done or (self._goes_on and self.feed.source.eager)
            over = begun - 1 if has_begun else begun
            entered = self.feed.source.entered - bool(done)
        length = self._length if epoch == self._epoch else self._learned_length
        place = {"epoch": epoch, "data_epoch": data_epoch, "done": done}
        return {**place, "iterations": max(0, over), "entered": entered, "length": length}

    def tests_state_dict(self, *, under_way: bool) -> dict[str, int]:
        """Do as `state_dict` for data of tests, which each test reads from their beginning. `under_way` says
        that a test is."""
        begins, ends = (count - under_way for count in self._events)
        over = self.feed.source.begun - under_way
        return {"iterations": max(0, over), "length": 0, "begins": begins, "ends": max(0, ends)}

    def load_tests_state_dict(self, state: dict[str, int]) -> None:
        """Continue as another process, from its `tests_state_dict()`."""
        self._loaded = dict(state)
        self._events = [state["begins"], state["ends"]]
        self.feed.source.replay_events(state["begins"], state["ends"])

    @property
    def _learned_length(self) -> int:
        """The length of the data as far as Keras' iterator knows it; else 0."""
        return (self._iterator._num_batches or 0) if self._iterator is not None else 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at another process' position."""
        self._loaded = dict(state)

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


def check_all_shards(dataset: Dataset) -> None:
    """Raise TrainingError if a model that no strategy holds would be given a part of the rows."""
    if len(dataset.shards) < dataset.num_shards:
        raise TrainingError(
            f"A model is given all rows. Received: {dataset!r}, of which this task has "
            f"{len(dataset.shards)} of {dataset.num_shards} shards, for a model of no strategy: each "
            "task would have a model of its own, on a part of the rows. Make and compile it in "
            "`with strategy.scope():` of an insitu.MultiWorkerMirroredStrategy(), or pass the dataset's "
            "`.all_shards()`."
        )


class DatasetAdapter(_UnevenBatches):
    """Gives a model that no strategy holds this process' rows of an `insitu.Dataset`, as plain batches."""

    def __init__(self, dataset: Dataset, class_weight: dict[int, float] | None = None) -> None:
        if dataset.is_refreshed:
            raise InputError(
                f"With --refresh models are trained under a strategy. Received: {dataset!r} for a model of "
                f"none. Build and compile it in strategy.scope()"
            )
        check_all_shards(dataset)
        refuse_texts(dataset)
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
            # Torch has no read-only tensors: rows in a partition's file are copied.
            yield keras.tree.map_structure(
                lambda leaf: torch.from_numpy(np.require(leaf, requirements="W")), batch
            )

    @property
    def num_batches(self) -> int | None:
        return None if self._dataset.passes is None else len(self._dataset)

    @property
    def batch_size(self) -> int:
        return int(self._dataset.batch_size)


class _Repeatable:
    """Calls a generator function again for each iteration."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())

    @property
    def _variant_tensor(self) -> Any:
        """TensorFlow's strategies ask for this of a dataset that they split. Raises TrainingError."""
        raise TrainingError(
            "An insitu.dataset is for models of insitu's strategies, or of none. Received: one for a model "
            "that was made in the scope of a strategy of tf.distribute. Make it in the scope of the strategy "
            "of that name of insitu"
        )


def register_dataset_adapter() -> None:
    """Let `fit`, `evaluate` and `predict` of every model take an `insitu.Dataset`. Done once."""
    original = data_adapters.get_data_adapter
    if getattr(original, "knows_insitu", False):
        return

    def get_data_adapter(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Any:
        x = take_whole(x)
        if not isinstance(x, Dataset):
            return original(x, y, sample_weight, **options)
        refuse_beside_dataset(y=y, sample_weight=sample_weight)
        return DatasetAdapter(x, options.get("class_weight"))

    get_data_adapter.knows_insitu = True  # type: ignore[attr-defined]
    data_adapters.get_data_adapter = get_data_adapter
    reset = EpochIterator.reset

    def reset_and_attach(self: EpochIterator) -> None:
        reset(self)
        if isinstance(self.data_adapter, FeedAdapter):
            self.data_adapter.attach(self)

    EpochIterator.reset = reset_and_attach


def refuse_beside_dataset(**arguments: Any) -> None:
    """Raise InputError if `fit` got arguments that an `insitu.Dataset` already holds."""
    for name, value in arguments.items():
        if value is not None:
            raise InputError(
                f"An insitu.Dataset holds its own labels, weights and batch size: leave {name} out. "
                f"Received: {name} of type {type(value).__name__}."
            )


def refuse_texts(dataset: Dataset) -> None:
    """Raise InputError for text that the backend's tensors can't hold."""
    if keras.backend.backend() != "tensorflow":
        dataset.refuse_texts()


def take_whole(x: Any) -> Any:
    """Return the dataset that a script has distributed itself, since `fit` does so; else `x`."""
    if not isinstance(x, PositionedData) or isinstance(x, Dataset):
        return x
    whole = x.whole
    if whole is None:
        raise InputError(
            "fit, evaluate and predict distribute the data themselves. Received: what "
            "distribute_datasets_from_function has made. Pass the dataset itself."
        )
    return whole
