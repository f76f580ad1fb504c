"""Random operations of a tf.data.Dataset draw by the job's seed and the epoch, also where calls run side by
side. What has an order and a seed of the script's stays as TensorFlow has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from insitu.base.errors import InputError
from insitu.train.fit import sources
from insitu.train.fit.sources import make_feed
from insitu.train.fit.streams import Source


@pytest.fixture(autouse=True)
def unseeded() -> Iterator[None]:
    before = context.context()._seed
    context.context()._seed = None
    yield
    context.context()._seed = before


def numbers(count: int = 24) -> Any:
    return tf.data.Dataset.from_tensor_slices(np.arange(count, dtype="float32"))


def augment(value: Any) -> Any:
    return value + tf.random.uniform((), 0, 0.5) + tf.random.normal((), 0, 0.01)


def in_parallel(data: Any, function: Callable[[Any], Any] = augment) -> Any:
    return data.map(function, num_parallel_calls=tf.data.AUTOTUNE).batch(8).prefetch(2)


def source_of(data: Any, **options: Any) -> Source:
    return make_feed(data, shards=(0,), num_shards=2, several_processes=True, **options).source


def read(source: Source, epoch: int = 0) -> list[float]:
    return np.concatenate([np.asarray(batch).ravel() for batch in source.begin()(epoch, 0)]).tolist()


@pytest.mark.parametrize("script_seed", [None, 5])
def test_processes_draw_the_same_numbers_and_others_in_each_epoch(script_seed: int | None) -> None:
    found = []
    for _ in range(4):
        if script_seed is not None:
            tf.random.set_seed(script_seed)
        source = source_of(in_parallel(numbers()), seed=3)
        found.append([read(source, epoch) for epoch in range(3)])
    assert found[0] == found[1] == found[2] == found[3]
    assert len({tuple(epoch) for epoch in found[0]}) == 3
    assert len({round(value % 1, 4) for epoch in found[0] for value in epoch}) > 60
    other = source_of(in_parallel(numbers()), seed=4)
    another_fit = source_of(in_parallel(numbers()), seed=3, fit=1)
    assert len({tuple(read(each)) for each in (other, another_fit)} | {tuple(found[0][0])}) == 3


def test_who_takes_the_data_up_draws_what_the_others_draw() -> None:
    there = source_of(in_parallel(numbers()), seed=3)
    expected = [read(there, epoch) for epoch in range(3)][2]
    here = source_of(in_parallel(numbers()), seed=3)
    here.peek()
    here.skip(2)
    assert read(here, 2) == expected


def test_the_order_of_a_shuffle_is_tensorflows() -> None:
    def make(function: Callable[[Any], Any]) -> Any:
        return in_parallel(numbers().shuffle(24, seed=1), function)

    plain = make(lambda value: value)
    source = source_of(make(lambda value: value + tf.random.uniform((), 0, 0.5)))
    for _ in range(2):
        wanted = [float(value) for batch in plain for value in batch]
        assert np.floor(read(source)).tolist() == wanted


def test_draws_with_an_order_and_a_seed_of_the_script_are_left() -> None:
    tf.random.set_seed(5)
    plain = [float(value) for batch in numbers().map(augment).batch(8) for value in batch]
    tf.random.set_seed(5)
    source = source_of(numbers().map(augment).batch(8))
    assert read(source) == read(source) == plain


def test_a_cache_keeps_what_the_first_epoch_has_drawn() -> None:
    def make() -> Any:
        return numbers().map(augment).cache().batch(8)

    there, here = source_of(make()), source_of(make())
    assert read(there) == read(there, 1)
    here.skip(1)
    assert read(here, 1) == read(there, 2)


def test_generators_and_layers_that_keep_a_state_go_on() -> None:
    def make(parallel: bool) -> Any:
        generator = tf.random.Generator.from_seed(3)
        return (
            numbers()
            .map(lambda value: value + generator.uniform(()), num_parallel_calls=4 if parallel else None)
            .batch(8)
        )

    plain = make(parallel=False)
    expected = [[float(value) for batch in plain for value in batch] for _ in range(3)]
    source = source_of(make(parallel=True))
    assert [read(source) for _ in range(2)] == expected[:2]
    # Of two iterations that are over, one was begun only.
    here = source_of(make(parallel=True))
    here.peek()
    here.skip(2, entered=1)
    assert read(here) == expected[1]


def test_both_kinds_are_refused() -> None:
    generator = tf.random.Generator.from_seed(3)
    with pytest.raises(InputError, match=r"Received: functions with both"):
        source_of(in_parallel(numbers(), lambda value: augment(value) + generator.uniform(())))


def test_a_dataset_that_cant_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(dataset: Any) -> Any:
        raise ValueError("too large")

    monkeypatch.setattr(sources, "_read_graph", fail)
    with pytest.raises(InputError, match=r"ValueError: too large.*Draw in layers of the model"):
        source_of(in_parallel(numbers()))
    # One process alone needs nobody's agreement.
    alone = make_feed(in_parallel(numbers()), shards=(0,), num_shards=1).source
    assert len(read(alone)) == 24


def test_what_draws_nothing_is_read_as_it_is() -> None:
    data = in_parallel(numbers().shuffle(4), lambda value: value + 1)
    order: Any = None
    assert sources.find_random_pipeline(data, order, must_agree=True) is None
