"""Data that comes in batches is read as Keras reads it, and again as it was."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from insitu.base.errors import InputError
from insitu.train.fit.arrays import DrawnOrder
from insitu.train.fit.sources import Repeated, make_feed
from insitu.train.fit.streams import OrderedBatches, PyDatasetSource, Source, StreamSource, TorchSource


def source_of(data: Any, **options: Any) -> Source:
    return make_feed(data, shards=(0,), num_shards=1, **options).source


def read(source: Source, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [np.asarray(batch[0]).tolist() for batch in source.begin()(epoch, start)]


class Fours(keras.utils.PyDataset):
    """Four batches of two rows. Tells what it hears."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.heard: list[str] = []

    @property
    def num_batches(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return np.arange(2) + 2 * index, np.zeros(2)

    def on_epoch_begin(self) -> None:
        self.heard.append("begin")

    def on_epoch_end(self) -> None:
        self.heard.append("end")


def shuffled() -> Any:
    return tf.data.Dataset.from_tensor_slices((np.arange(12), np.zeros(12))).shuffle(12, seed=3).batch(4)


def test_a_look_at_the_first_batch_uses_up_no_iteration():
    plain = shuffled()
    expected = [[np.asarray(x).tolist() for x, _ in plain] for _ in range(2)]
    source = source_of(shuffled())
    assert source.peek()[0].numpy().tolist() == source.peek()[0].numpy().tolist() == expected[0][0]
    assert [read(source), read(source)] == expected
    assert source.begun == 2


def test_an_iteration_that_another_process_has_done_is_skipped():
    plain = shuffled()
    expected = [[np.asarray(x).tolist() for x, _ in plain] for _ in range(4)]
    source = source_of(shuffled())
    source.peek()
    source.skip(3)
    assert (read(source, start=1), source.begun) == (expected[3][1:], 4)


def test_a_generator_loses_no_batch():
    def batches() -> Iterator[Any]:
        for index in range(3):
            yield np.full(2, index), np.zeros(2)

    source = source_of(batches())
    source.peek()
    assert read(source) == [[0, 0], [1, 1], [2, 2]]
    assert source.num_steps is None


def test_a_py_dataset_is_shuffled_by_batches_in_the_same_order_everywhere():
    def orders() -> list[list[list[int]]]:
        source = source_of(Fours(), shuffle=True, seed=2)
        found = []
        for epoch in range(3):
            source.begin_epoch(epoch)
            found.append(read(source, epoch))
            source.end_epoch()
        return found

    first = orders()
    assert first == orders()
    assert all(sorted(order) == [[0, 1], [2, 3], [4, 5], [6, 7]] for order in first)
    assert first[0] != first[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_py_dataset_hears_of_epochs(workers):
    data = Fours(workers=workers)
    source = source_of(data)
    assert source.peek()[0].tolist() == [0, 1]
    for epoch in range(2):
        source.begin_epoch(epoch)
        assert read(source, epoch) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        source.end_epoch()
    assert data.heard == ["begin", "end"] * 2
    source.replay_epochs(2)
    assert data.heard == ["begin", "end"] * 4


def test_an_order_is_drawn_once_for_an_epoch():
    ordered = OrderedBatches(Fours(), DrawnOrder(1).generator)
    before = [ordered[index][0][0] for index in range(4)]
    ordered.draw(0)
    assert [ordered[index][0][0] for index in range(4)] == before
    assert isinstance(source_of(Fours()), PyDatasetSource)


def test_data_without_batches_is_named():
    with pytest.raises(InputError, match=r"at least one batch"):
        source_of(tf.data.Dataset.range(0).batch(2)).peek()


def test_a_loader_without_a_length_is_a_stream():
    torch = pytest.importorskip("torch")

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return zip(torch.arange(5), torch.zeros(5), strict=True)

    source = source_of(torch.utils.data.DataLoader(Rows(), batch_size=2))
    assert source.peek()[0].tolist() == [0, 1]
    source.skip(1)
    assert read(source) == [[0, 1], [2, 3], [4]]
    # As on PyTorch, where an iteration begins with the loader's own iterator.
    source = TorchSource(None, source._loader, source._loader.__iter__, eager=True)
    assert source.peek()[0].tolist() == [0, 1]
    assert read(source) == [[0, 1], [2, 3], [4]]


def test_a_loader_of_pytorch_draws_its_order_as_often_as_it_is_iterated():
    torch = pytest.importorskip("torch")

    def loader() -> Any:
        data = torch.utils.data.TensorDataset(torch.arange(12), torch.zeros(12))
        generator = torch.Generator().manual_seed(3)
        return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=generator)

    plain = loader()
    expected = [[x.tolist() for x, _ in plain] for _ in range(3)]
    source = source_of(loader())
    source.skip(2)
    assert read(source) == expected[2]


def test_an_adapter_may_give_an_iterable_that_is_no_iterator():
    """As Keras' adapter of grain does."""
    source = StreamSource(SimpleNamespace(num_batches=2), lambda: [np.zeros(1), np.ones(1)])
    assert source.peek().tolist() == [0]
    assert [batch.tolist() for batch in source.begin()(0, 0)] == [[0], [1]]
    assert [batch.tolist() for batch in source.begin()(1, 1)] == [[1]]


def first(source: Source, start: int, count: int) -> list[list[int]]:
    batches = source.begin()(0, start)
    return [np.asarray(batch[0]).tolist() for _, batch in zip(range(count), batches, strict=False)]


def arrays() -> dict[str, Any]:
    return {"x": Repeated(np.arange(10)), "y": np.zeros(10), "batch_size": 4, "shuffle": True}


def unknown_length() -> Any:
    return shuffled().filter(lambda x, y: True)


@pytest.mark.parametrize(
    "make", [arrays, lambda: {"x": Repeated(shuffled())}, lambda: {"x": Repeated(unknown_length())}]
)
def test_data_that_is_repeated_goes_on_over_its_end_from_any_step(make):
    once = {**make(), "x": make()["x"].x}
    plain = source_of(once.pop("x"), **once)
    expected = [batch for epoch in range(3) for batch in read(plain, epoch)]
    assert len(expected) == 9
    for start in range(8):
        source = _source(make())
        assert source.num_steps is None
        source.peek()  # uses up none
        assert first(source, start, 9 - start) == expected[start:]


def _source(options: dict[str, Any]) -> Source:
    return source_of(options.pop("x"), **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_py_dataset_that_is_repeated_hears_of_its_passes(workers):
    data = Fours(workers=workers)
    source = source_of(Repeated(data))
    batches = source.begin()(0, 0)
    assert [next(batches)[0][0] for _ in range(6)] == [0, 2, 4, 6, 0, 2]
    assert data.heard == ["begin", "end", "begin"]
    batches.close()
    assert data.heard == ["begin", "end", "begin", "end"]


def test_repeated_data_without_batches_is_named():
    empty = (
        tf.data.Dataset.from_tensor_slices((np.arange(4), np.zeros(4))).filter(lambda x, y: x > 9).batch(2)
    )
    with pytest.raises(InputError, match=r"at least one batch. Received: none"):
        next(source_of(Repeated(empty)).begin()(0, 0))
