"""Sources of global batches: data that comes in batches, as Keras' own adapters read it.

Keras begins an *iteration* of the data for each epoch, or for several epochs if `steps_per_epoch` is less
than the data has. Its first reads, to learn about shapes, are handed back to the first iteration: a generator
loses no batch, and a shuffle with a seed draws what it would draw without a strategy.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from insitu.base.errors import InputError

Reader = Callable[[int, int], Iterator[Any]]
"""Gives the global batches of an epoch of the data, from a step on. Called once."""


class Source:
    """Gives global batches, the same in each process. This base does nothing at the events of epochs."""

    #: Iterations that have begun. Written by subclasses.
    begun = 0
    #: Iterations of which a step was read. Written by subclasses that go by it.
    entered = 0
    #: Whether any step can be read at any time.
    restartable = False
    #: Whether `begin` draws what its iteration draws; else the first step does.
    eager = False

    @property
    def num_steps(self) -> int | None:
        """The number of batches of an epoch; None if it isn't known."""
        raise NotImplementedError

    def peek(self) -> Any:
        """Return the first batch. The first iteration gives it again."""
        raise NotImplementedError

    def begin(self) -> Reader:
        """Begin an iteration of the data."""
        raise NotImplementedError

    def drop_peeked(self) -> None:
        """Let what `peek` read be an iteration that is over: Keras builds a model by one on some backends."""

    def skip(self, iterations: int, entered: int | None = None) -> None:
        """Let this many iterations be over, which another process has done. It has read `entered` of all that
        are over, or all; of the others it has read nothing."""

    def begin_epoch(self, epoch: int) -> None:
        """Hear of the beginning of an epoch of Keras', which reads epoch `epoch` of the data."""

    def end_epoch(self) -> None:
        """Hear of the end of an epoch of Keras'."""

    def replay_epochs(self, count: int) -> None:
        """Hear of this many epochs that another process has done."""

    def replay_events(self, begins: int, ends: int) -> None:
        """Replay so many beginnings and ends of epochs that another process has received."""


class StreamSource(Source):
    """Batches of an adapter of Keras'. `start` begins an iteration."""

    def __init__(self, adapter: Any, start: Callable[[], Iterable[Any]], *, eager: bool = False) -> None:
        self._adapter = adapter
        self._start: Callable[[], Iterator[Any]] = lambda: iter(start())
        self.eager = eager
        #: An iteration that `peek` has begun, whole again; else None.
        self._peeked: Iterator[Any] | None = None

    @property
    def num_steps(self) -> int | None:
        return None if self._adapter.num_batches is None else int(self._adapter.num_batches)

    def peek(self) -> Any:
        # Not by their truth: a loader's iterator has a length.
        iterator = self._start() if self._peeked is None else self._peeked
        first = next(iterator, None)
        if first is None:
            raise InputError("The data must have at least one batch. Received: none.")
        self._peeked = itertools.chain([first], iterator)
        return first

    def begin(self) -> Reader:
        iterator = self._begin_now() if self.eager else None

        def read(epoch: int, start: int) -> Iterator[Any]:
            return itertools.islice(self._begin_now() if iterator is None else iterator, start, None)

        return read

    def _begin_now(self) -> Iterator[Any]:
        iterator = self._start() if self._peeked is None else self._peeked
        self._peeked = None
        self.begun += 1
        return iterator

    def drop_peeked(self) -> None:
        if self._peeked is not None:
            self._peeked = None
            self.begun += 1

    def skip(self, iterations: int, entered: int | None = None) -> None:
        if iterations > 0 and self._peeked is not None:
            self.drop_peeked()
            iterations -= 1
        for _ in range(iterations):
            self._skip_one()
            self.begun += 1

    def _skip_one(self) -> None:
        deque(self._start(), maxlen=0)

    def begin_epoch(self, epoch: int) -> None:
        self._adapter.on_epoch_begin()

    def end_epoch(self) -> None:
        self._adapter.on_epoch_end()


class TensorFlowSource(StreamSource):
    """Batches of a `tf.data.Dataset`. The order of a shuffle is drawn when its iteration begins."""

    def __init__(
        self, adapter: Any, start: Callable[[int], Iterable[Any]], *, eager: bool, is_read_whole: bool = False
    ) -> None:
        """`start` is given the number of the iteration. With `is_read_whole` an iteration that is skipped
        is read: it changes what the next one draws."""
        super().__init__(adapter, lambda: start(self.begun), eager=eager)
        self._is_read_whole = is_read_whole
        #: How many iterations may be read while some are skipped; None: all. Written by `skip`.
        self._to_enter: int | None = None

    def begin(self) -> Reader:
        begin = super().begin()

        def read(epoch: int, start: int) -> Iterator[Any]:
            self.entered += 1
            return begin(epoch, start)

        return read

    def skip(self, iterations: int, entered: int | None = None) -> None:
        self._to_enter = entered
        super().skip(iterations)
        self._to_enter = None

    def drop_peeked(self) -> None:
        self._read_whole(self._peeked)
        super().drop_peeked()

    def _skip_one(self) -> None:
        self._read_whole(self._start())

    def _read_whole(self, iterator: Iterator[Any] | None) -> None:
        if not self._is_read_whole or (self._to_enter is not None and self.entered >= self._to_enter):
            return
        deque(iterator or (), maxlen=0)
        self.entered += 1


class TorchSource(StreamSource):
    """Batches of a PyTorch `DataLoader`."""

    def __init__(self, adapter: Any, loader: Any, start: Callable[[], Iterator[Any]], *, eager: bool) -> None:
        super().__init__(adapter, start, eager=eager)
        self._loader = loader

    def _skip_one(self) -> None:
        """Draw what an iteration draws, without reading rows."""
        import torch

        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        if isinstance(self._loader.dataset, torch.utils.data.IterableDataset):
            return
        deque(self._loader.batch_sampler or (), maxlen=0)


class PyDatasetSource(StreamSource):
    """Batches of a `PyDataset`, which receives the epochs as from Keras."""

    def __init__(self, adapter: Any, dataset: Any, start: Callable[[], Iterator[Any]]) -> None:
        super().__init__(adapter, start)
        self._dataset = dataset

    def peek(self) -> Any:
        # Not by an iteration: with workers it would be under way from then on.
        if self.num_steps == 0:
            raise InputError("The data must have at least one batch. Received: none.")
        return self._adapter._standardize_batch(self._dataset[0])

    def drop_peeked(self) -> None:
        self._dataset.on_epoch_begin()

    def skip(self, iterations: int, entered: int | None = None) -> None:
        self.begun += iterations

    def begin_epoch(self, epoch: int) -> None:
        if isinstance(self._dataset, OrderedBatches):
            self._dataset.draw(epoch)
        super().begin_epoch(epoch)

    def replay_epochs(self, count: int) -> None:
        for _ in range(count):
            self._dataset.on_epoch_begin()
            self._dataset.on_epoch_end()

    def replay_events(self, begins: int, ends: int) -> None:
        for number in range(max(begins, ends)):
            if number < ends:
                self._dataset.on_epoch_end()  # Keras ends what may be open before it begins a test
            if number < begins:
                self._dataset.on_epoch_begin()


class OrderedBatches(keras.utils.PyDataset):
    """A `PyDataset` whose batches are read in an order that is the same in each process."""

    def __init__(self, dataset: Any, generator: Callable[[int], np.random.Generator]) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._generator = generator
        #: The epoch that the order was drawn for.
        self._epoch = -1
        self._order: list[int] = []
        self.draw(0)

    def draw(self, epoch: int) -> None:
        """Draw the order of an epoch."""
        if epoch != self._epoch or len(self._order) != self.num_batches:
            self._epoch = epoch
            self._order = self._generator(epoch).permutation(self.num_batches).tolist()

    @property
    def num_batches(self) -> int:
        return int(self._dataset.num_batches)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._order[index]]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


class RepeatedSource(Source):
    """Batches of another source, which is read again when it ends: as one epoch of the data that has no end.
    The other one receives an epoch for each pass over it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def num_steps(self) -> int | None:
        return None

    @property
    def restartable(self) -> bool:  # type: ignore[override]
        """Whether any step can be read at any time."""
        return self._source.restartable

    def peek(self) -> Any:
        return self._source.peek()

    def drop_peeked(self) -> None:
        self._source.drop_peeked()

    def begin(self) -> Reader:
        self.begun += 1
        return self._read

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        source, number, left = self._source, 0, start
        length = source.num_steps
        if length:
            number, left = divmod(start, length)
            source.replay_epochs(number)
            source.skip(number)
        while True:
            source.begin_epoch(number)
            try:
                is_empty = True
                for batch in source.begin()(number, left if length else 0):
                    is_empty = False
                    if left and not length:
                        left -= 1  # passes of unknown length are counted by reading them
                        continue
                    yield batch
            finally:
                source.end_epoch()
            if is_empty:
                raise InputError("Data that is read again must have at least one batch. Received: none.")
            number, left = number + 1, 0 if length else left
