"""What distributed data looks like: batches, iterators, signatures, indices, strings, generators."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from tutorial_run import NAME, distribute, images, make_strategy, report

strategy = make_strategy()
BATCH = 16
x, y = images()
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = dataset.with_options(options)
dist_dataset = strategy.experimental_distribute_dataset(dataset)


def total_of(value):
    """The sum over all replicas, whatever each has."""
    return strategy.reduce(distribute.ReduceOp.SUM, value, axis=None)


@tf.function
def train_step(inputs):
    features, labels = inputs
    return tf.reduce_sum(tf.cast(labels, tf.float32) - 0.3 * tf.reduce_mean(features, (1, 2, 3)))


sums = [total_of(strategy.run(train_step, args=(batch,))) for batch in dist_dataset]
for _ in range(2):
    iterator = iter(dist_dataset)
    for _ in range(3):
        sums.append(total_of(strategy.run(train_step, args=(iterator.get_next(),))))

# A loop in a function, until the data ends.
numbers = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(9).batch(4)))
seen = []


@tf.function
def read_all(iterator):
    for _ in tf.range(5):
        optional = iterator.get_next_as_optional()
        if not optional.has_value():
            break
        values = strategy.run(lambda v: v, args=(optional.get_value(),))
        seen.append(tf.concat(strategy.experimental_local_results(values), 0))


if NAME == "default":
    seen = [np.arange(9)]
else:
    read_all(numbers)
read = strategy.gather(np.concatenate([np.asarray(v) for v in seen]), 0) if NAME == "workers" else None
read = np.sort(np.concatenate([np.asarray(v) for v in seen]) if read is None else np.asarray(read))


@tf.function(input_signature=[dist_dataset.element_spec])
def with_signature(inputs):
    def step(batch):
        return tf.reduce_sum(2 * batch[0])

    return strategy.run(step, args=(inputs,))


doubled = [total_of(with_signature(batch)) for batch in dist_dataset]

# Texts, looked up where each worker makes its own data.
with strategy.scope():
    lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c", "d", "f"])


def make_texts(input_context):
    texts = tf.data.Dataset.from_tensor_slices(["a", "c", "e"]).repeat()
    batch_size = input_context.get_per_replica_batch_size(4)
    texts = texts.batch(batch_size).shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return texts.map(lookup)


texts = iter(strategy.distribute_datasets_from_function(make_texts))
looked_up = [total_of(strategy.run(tf.reduce_sum, args=(next(texts),))) for _ in range(3)]

# Each prediction with the index of its row.
indexed = tf.data.Dataset.range(24).enumerate().batch(6)
result = {}
for index, inputs in strategy.experimental_distribute_dataset(indexed):
    output_index, outputs = strategy.run(lambda i, v: (i, 2 * v), args=(index, inputs))
    indices = [a for part in strategy.experimental_local_results(output_index) for a in part.numpy()]
    values = [a for part in strategy.experimental_local_results(outputs) for a in part.numpy()]
    result.update(zip(indices, values))
right = all(value == 2 * index for index, value in result.items())

# Without a seed, still each row once.
shuffled = strategy.experimental_distribute_dataset(tf.data.Dataset.range(24).shuffle(24).batch(7))
parts = [strategy.gather(strategy.run(lambda v: v, args=(batch,)), axis=0) for batch in shuffled]
entered = np.sort(np.concatenate([np.asarray(part) for part in parts]))

values = strategy.experimental_distribute_values_from_function(
    lambda context: tf.constant(1.0 + context.replica_id_in_sync_group)
)
ids = total_of(strategy.run(lambda v: v * 0 + 1 / strategy.num_replicas_in_sync, args=(values,)))


def numbers_without_end():
    for number in range(100):
        yield np.full(4, number, "float32")


generated = tf.data.Dataset.from_generator(
    numbers_without_end, output_signature=tf.TensorSpec((4,), tf.float32)
)
rows = iter(strategy.experimental_distribute_dataset(generated))
from_generator = [total_of(strategy.run(tf.reduce_sum, args=(next(rows),))) for _ in range(4)]
report(
    sums=sums,
    read=read,
    doubled=doubled,
    looked_up=looked_up,
    right=right,
    entered=entered,
    ids=ids,
    from_generator=from_generator,
)
