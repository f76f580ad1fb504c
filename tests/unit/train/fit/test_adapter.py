"""A feed as Keras sees it: cut into epochs as Keras cuts its own data, from any position on."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.src.trainers import data_adapters
from keras.src.trainers.epoch_iterator import EpochIterator

import insitu
from insitu.base.errors import InputError, TrainingError
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.train.fit import EpochLengths
from insitu.train.fit.adapter import FeedAdapter, register_dataset_adapter
from insitu.train.fit.feed import StreamFeed
from insitu.train.fit.sources import make_feed

register_dataset_adapter()


class Fit:
    """What Keras' `fit` does with its iterator, on PyTorch: notes the rows of each epoch."""

    def __init__(self, make: Any, steps: int | None, execution: int, *, initial: int = 0) -> None:
        self.position = (initial, 0)
        self.adapter = FeedAdapter(
            make(), steps, lambda: self.position, initial_epoch=initial, steps_per_execution=execution
        )
        self.iterator = EpochIterator(self.adapter, steps_per_epoch=steps, steps_per_execution=execution)
        self.iterator._get_iterator = lambda: self.adapter
        self.initial = initial
        self.saved: list[tuple[tuple[int, int], dict[str, int]]] = []

    def run(self, epochs: int) -> list[list[list[int]]]:
        """Return the first column of each batch, by epoch; [-1] for a batch that was skipped."""
        self.iterator.reset()
        seen: list[list[list[int]]] = []
        for epoch in range(self.position[0], epochs):
            self.position = (epoch, self.position[1] if epoch == self.position[0] else 0)
            seen.append([])
            first, done = self.position[1], 0
            for _, _, batches in self.iterator:
                for batch in batches:
                    done += 1
                    if not batch.skipped:
                        self.position = (epoch, done)
                        seen[-1].append(batch.parts[0].data[0].tolist())
                        self.saved.append((self.position, self.adapter.state_dict(epoch)))
                    else:
                        assert done <= first
                        seen[-1].append([-1])
            # The tests of the epoch may follow.
            self.saved.append(((epoch, done), self.adapter.state_dict(epoch)))
            self.position = (epoch + 1, 0)
            self.saved.append((self.position, self.adapter.state_dict(epoch + 1)))
        return seen


def plain_rows(data: Any, epochs: int, steps: int | None, execution: int, **options: Any) -> Any:
    iterator = EpochIterator(data, steps_per_epoch=steps, steps_per_execution=execution, **options)
    iterator.reset()
    seen = []
    for _ in range(epochs):
        batches = [np.asarray(x).tolist() for _, _, group in iterator for x in map(first_leaf, group)]
        seen.append(batches)
    return seen


def first_leaf(batch: Any) -> Any:
    return keras.tree.flatten(batch)[0]


COUNTS = {
    "batches": st.integers(1, 9),
    "steps": st.none() | st.integers(1, 12),
    "execution": st.integers(1, 3),
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@given(**COUNTS)
def test_epochs_have_the_steps_that_they_have_in_keras(batches, steps, execution):
    x = np.arange(2 * batches)
    plain = plain_rows(x, 5, steps, execution, batch_size=2)
    assert Fit(lambda: feed_of(x), steps, execution).run(5) == plain


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@given(**COUNTS, initial=st.integers(0, 2), chosen=st.integers(0, 1000))
def test_another_process_goes_on_at_any_position(batches, steps, execution, initial, chosen):
    x = np.arange(2 * batches)
    first = Fit(lambda: feed_of(x, shuffle=True), steps, execution, initial=initial)
    whole = first.run(initial + 4)
    (epoch, step), state = first.saved[chosen % len(first.saved)]
    if epoch == initial + 4:
        return
    second = Fit(lambda: feed_of(x, shuffle=True), steps, execution, initial=initial)
    second.position = (epoch, step)
    second.adapter.load_state_dict(state)
    rest = second.run(initial + 4)
    expected = whole[epoch - initial :]
    assert rest[1:] == expected[1:]
    assert rest[0] == [[-1]] * step + expected[0][step:]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@settings(max_examples=40, deadline=None)
@given(COUNTS["batches"], COUNTS["steps"], st.integers(0, 1000), st.booleans())
def test_another_process_goes_on_in_a_stream_of_unknown_length(batches, steps, chosen, repeats):
    def make() -> StreamFeed:
        import tensorflow as tf

        data = tf.data.Dataset.range(2 * batches).shuffle(50, seed=1).filter(lambda x: x >= 0).batch(2)
        return make_feed(data.repeat() if repeats and steps else data, shards=(0,), num_shards=1)

    first = Fit(make, steps, 1)
    whole = first.run(4)
    (epoch, step), state = first.saved[chosen % len(first.saved)]
    if epoch == 4:
        return
    second = Fit(make, steps, 1)
    second.position = (epoch, step)
    second.adapter.load_state_dict(state)
    rest = second.run(4)
    assert rest[1:] == whole[epoch + 1 :]
    assert rest[0] == [[-1]] * step + whole[epoch][step:]


class Drawing(keras.utils.PyDataset):
    """Draws its order at each event of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)
        self.order = np.arange(8)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.order[2 * index : 2 * index + 2], np.zeros(2)

    def on_epoch_begin(self) -> None:
        self.order = self.generator.permutation(8)

    on_epoch_end = on_epoch_begin


def stream_of_tests(kind: str) -> StreamFeed:
    if kind == "PyDataset":
        return make_feed(Drawing(), shards=(0,), num_shards=1)
    import tensorflow as tf

    data = tf.data.Dataset.range(8).shuffle(50, seed=1).filter(lambda x: x >= 0).batch(2)
    if kind == "tf.data of known length":
        data = data.apply(tf.data.experimental.assert_cardinality(4))
    return make_feed(data, shards=(0,), num_shards=1)


class Validations:
    """What Keras' `evaluate` does, once after each epoch of a fit."""

    def __init__(self, kind: str) -> None:
        self.test = 0
        self.adapter = FeedAdapter(stream_of_tests(kind), start=lambda: (0, self.test))
        self.iterator = EpochIterator(self.adapter)
        self.iterator._get_iterator = lambda: self.adapter
        self.saved: list[tuple[int, int, dict[str, int]]] = []

    def run(self, tests: range) -> list[list[list[int]]]:
        seen: list[list[list[int]]] = []
        for number in tests:
            seen.append([])
            self.iterator.reset()
            for _, _, (batch,) in self.iterator:
                if batch.skipped:
                    continue
                self.test += 1
                seen[-1].append(batch.parts[0].data[0].tolist())
                self.saved.append((number, self.test, self.adapter.tests_state_dict(under_way=True)))
            self.test = 0
            self.saved.append((number + 1, 0, self.adapter.tests_state_dict(under_way=False)))
        return seen


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", ["tf.data", "tf.data of known length", "PyDataset"])
def test_another_process_goes_on_in_the_tests(kind: str) -> None:
    first = Validations(kind)
    whole = first.run(range(4))
    assert len({str(each) for each in whole}) == 4
    for number, test, state in first.saved[:-1]:
        second = Validations(kind)
        second.test = test
        second.adapter.load_tests_state_dict(state)
        rest = second.run(range(number, 4))
        assert rest[1:] == whole[number + 1 :]
        assert rest[0] == whole[number][test:]


def feed_of(x: Any, **options: Any) -> Any:
    return make_feed(x, batch_size=2, shards=(0,), num_shards=1, **options)


def test_lengths_of_epochs_are_of_whole_executions():
    def lengths(batches: int, steps: int | None, execution: int = 1) -> EpochLengths:
        return FeedAdapter(
            feed_of(np.arange(2 * batches)), steps, steps_per_execution=execution
        ).epoch_lengths

    assert [lengths(6, None), lengths(6, 5), lengths(8, 3, 2)] == [
        EpochLengths(6, 0),
        EpochLengths(6, 5),
        EpochLengths(8, 4),
    ]


def test_an_iteration_starts_where_the_position_is_when_its_first_step_is_asked_for():
    position = [(0, 0)]
    steps = iter(FeedAdapter(feed_of(np.arange(6)), start=lambda: position[-1]))
    position.append((0, 2))
    assert [step.skipped for step in steps] == [True, True, False]


def test_steps_are_of_the_shards_that_were_assigned_last():
    feed = make_feed(np.arange(8), batch_size=4, shards=(0,), num_shards=2)
    adapter = FeedAdapter(feed)
    steps = iter(adapter)
    assert next(steps).shards == (0,)
    adapter.assign_shards((0, 1))
    assert adapter.step_at(0, 0).shards == (0, 1)
    step = next(steps)
    assert step.shards == (0, 1)
    assert [part.data[0].tolist() for part in step.parts] == [[4, 5], [6, 7]]


def test_the_dataset_adapter_is_registered_once():
    register_dataset_adapter()
    registered = data_adapters.get_data_adapter
    register_dataset_adapter()
    assert data_adapters.get_data_adapter is registered
    adapter = data_adapters.get_data_adapter(np.arange(6), batch_size=4)
    assert not isinstance(adapter, FeedAdapter)
    assert keras.tree.flatten(next(iter(adapter.get_numpy_iterator())))[0].tolist() == [0, 1, 2, 3]


def test_a_model_of_no_strategy_is_given_all_rows(home, tmp_path, strategy_over):
    x = np.arange(39, dtype="float32").reshape(13, 3)
    np.savez(tmp_path / "rows.npz", x=x, label=x[:, :1])
    import_cache(Paths(home), "rows", [str(tmp_path / "rows.npz")], partitions=4)

    def rows(*shards: int) -> Any:
        context = dataclasses.replace(insitu.context(), shards=shards, num_shards=2)
        return insitu.grid.dataset("rows", context=context).batch(5)

    plain = keras.Sequential([keras.Input((3,)), keras.layers.Identity()])
    plain.compile("sgd", "mse")
    for call in (plain.fit, plain.evaluate, plain.predict):
        with pytest.raises(TrainingError, match=r"1 of 2 shards.*with strategy.scope.*all_shards"):
            call(rows(1), verbose=0)
    with strategy_over(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Identity()])
        model.compile("sgd", "mse")
    expected = model.predict(rows(0, 1), verbose=0)
    assert sorted(expected[:, 0]) == sorted(x[:, 0])
    # Rows of all shards come in the order of what a strategy predicts.
    everything = rows(1).all_shards()
    np.testing.assert_array_equal(plain.predict(everything, verbose=0), expected)
    np.testing.assert_array_equal(np.concatenate([x for x, _ in everything]), expected)


def test_fit_takes_what_a_strategy_has_distributed_of_a_dataset(strategy_over):
    x = np.arange(39, dtype="float32").reshape(13, 3)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    losses = []
    for replicas in (1, 2):
        strategy = strategy_over(replicas)
        for rows in (data, strategy.experimental_distribute_dataset(data)):
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(1e-4), "mse")
            history = model.fit(rows, validation_data=rows, epochs=2, shuffle=False, verbose=0).history
            losses.append([*history["loss"], *history["val_loss"], model.evaluate(rows, verbose=0)])
            assert model.predict(rows, verbose=0).shape == (13, 1)
    np.testing.assert_allclose(losses[1:], [losses[0]] * 3, rtol=1e-5)
    part = strategy.distribute_datasets_from_function(lambda context: data)
    with pytest.raises(InputError, match="Pass the dataset itself"):
        model.fit(part, verbose=0)
