"""A loop of one's own in several workers, each of which makes its part of the data.

Checkpoints have the place in training, from which it continues.
"""

from __future__ import annotations

import os

import keras
import tensorflow as tf
from tutorial_run import distribute, images, make_strategy, report, weights_of

GLOBAL_BATCH, EPOCHS, STEPS = 16, 3, 4
folder = os.environ["TUTORIAL_RESULTS"]


def make_data(input_context):
    x, y = images(96)
    batch_size = input_context.get_per_replica_batch_size(GLOBAL_BATCH)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = data.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return data.batch(batch_size)


def make_model():
    l2 = keras.regularizers.L2(1e-3)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu", kernel_regularizer=l2),
            keras.layers.Flatten(),
            keras.layers.Dense(2, kernel_regularizer=l2),
        ]
    )


strategy = make_strategy()
with strategy.scope():
    model = make_model()
    data = strategy.distribute_datasets_from_function(lambda input_context: make_data(input_context))
    optimizer = keras.optimizers.RMSprop(learning_rate=0.001)
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")


@tf.function
def train_step(iterator):
    def step_fn(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss_of_rows = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
            loss = tf.nn.compute_average_loss(loss_of_rows(y, predictions))
            if model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        train_accuracy.update_state(y, predictions)
        return loss

    losses = strategy.run(step_fn, args=(next(iterator),))
    return strategy.reduce(distribute.ReduceOp.SUM, losses, axis=None)


epoch = tf.Variable(initial_value=tf.constant(0, dtype=tf.dtypes.int64), name="epoch")
step_in_epoch = tf.Variable(initial_value=tf.constant(0, dtype=tf.dtypes.int64), name="step_in_epoch")
resolver = strategy.cluster_resolver or distribute.cluster_resolver.TFConfigClusterResolver()
task_type, task_id, cluster = resolver.task_type, resolver.task_id, resolver.cluster_spec()


def is_chief():
    return (
        task_type is None
        or task_type == "chief"
        or (task_type == "worker" and task_id == 0 and "chief" not in cluster.as_dict())
    )


def path_of(name):
    where = folder if is_chief() else os.path.join(folder, f"workertemp_{task_id}")
    tf.io.gfile.makedirs(where)
    return os.path.join(where, name)


checkpoint = tf.train.Checkpoint(model=model, epoch=epoch, step_in_epoch=step_in_epoch)
manager = tf.train.CheckpointManager(checkpoint, directory=path_of("checkpoints"), max_to_keep=1)
latest = tf.train.latest_checkpoint(path_of("checkpoints"))
if latest:
    checkpoint.restore(latest)

history = []
while epoch.numpy() < EPOCHS:
    iterator = iter(data)
    total, batches = 0.0, 0
    while step_in_epoch.numpy() < STEPS:
        total += train_step(iterator)
        batches += 1
        step_in_epoch.assign_add(1)
    history.append([total / batches, train_accuracy.result()])
    train_accuracy.reset_state()
    manager.save()
    epoch.assign_add(1)
    step_in_epoch.assign(0)
report(history=history, weights=weights_of(model))
