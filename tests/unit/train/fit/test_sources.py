"""Whatever a user gives to `fit` becomes a feed of global batches, or an error that says what to do."""

from __future__ import annotations

import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.train.fit.sources import make_feed


def test_a_tf_dataset_and_a_py_dataset_are_streams_of_global_batches():
    import keras
    import tensorflow as tf

    class Four(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int):
            return np.arange(4) + 4 * index, np.zeros(4)

    for data in (Four(), tf.data.Dataset.from_tensor_slices((np.arange(8), np.zeros(8))).batch(4)):
        feed = make_feed(data, shards=(1,), num_shards=2)
        assert feed.num_steps == 2
        assert [s.parts[0].data[0].tolist() for s in feed.steps(0, 0)] == [[2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": np.zeros((0, 2))}, "at least one"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, "same number of rows"),
        ({"x": object()}, "Received: object"),
        ({"x": iter(())}, "Received: tuple_iterator"),
    ],
)
def test_bad_data_is_named(arguments, message):
    with pytest.raises(InputError, match=message):
        make_feed(**arguments, shards=(0, 1), num_shards=2)


def test_labels_beside_whole_batches_are_refused():
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices((np.arange(4), np.zeros(4))).batch(2)
    with pytest.raises(InputError, match=r"leave y out\. Received: y of type ndarray"):
        make_feed(batches, np.zeros(4), shards=(0,), num_shards=1)


def test_only_several_processes_compare_what_they_were_given():
    x = np.arange(6)
    options = {"batch_size": 2, "shards": (0,), "num_shards": 2}
    for several in (False, True):
        feed = make_feed(x, **options, several_processes=several)
        numbers = {part.fingerprint for step in feed.steps(0, 0) for part in step.parts}
        assert len(numbers) == 1 and (numbers == {0}) != several


def test_class_weights_beside_batches_with_weights_are_refused():
    with pytest.raises(InputError, match="class_weight with a generator"):
        make_feed((batch for batch in ()), class_weight={0: 1.0}, shards=(0,), num_shards=1)


def test_class_weights_become_weights_of_rows():
    x, y = np.arange(4), np.array([0, 1, 1, 0])
    feed = make_feed(x, y, batch_size=4, class_weight={0: 1.0, 1: 3.0}, shards=(0,), num_shards=1)
    (step,) = feed.steps(0, 0)
    assert np.asarray(step.parts[0].data[2]).tolist() == [1, 3, 3, 1]


def test_rows_that_are_a_process_own_are_not_cut_again():
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = tf.data.Dataset.range(4).batch(2).with_options(options)
    with pytest.raises(InputError, match=r"AutoShardPolicy\.OFF.*distribute_datasets_from_function"):
        make_feed(data, shards=(1,), num_shards=2)
    assert make_feed(data, shards=(0, 1), num_shards=2).num_steps == 2
