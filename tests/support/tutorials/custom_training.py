"""A loop of one's own: compiled steps, regularizers, checkpoints, and a whole epoch in one function."""

from __future__ import annotations

import os

import keras
import tensorflow as tf
from tutorial_run import distribute, images, make_strategy, report, weights_of

strategy = make_strategy()
BATCH, EPOCHS, ROWS = 16, 2, 90

x, y = images(ROWS)
train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).batch(BATCH)
test = tf.data.Dataset.from_tensor_slices((x[:35], y[:35])).batch(BATCH)
train_data = strategy.experimental_distribute_dataset(train)
test_data = strategy.experimental_distribute_dataset(test)


def make_model() -> keras.Model:
    l2 = keras.regularizers.L2(1e-3)
    return keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, activation="relu", kernel_regularizer=l2),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="relu", kernel_regularizer=l2),
            keras.layers.Dense(2, kernel_regularizer=l2),
        ]
    )


with strategy.scope():
    loss_of_rows = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels, predictions, losses):
        loss = tf.nn.compute_average_loss(loss_of_rows(labels, predictions))
        if losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(losses))
        return loss

    test_loss = keras.metrics.Mean(name="test_loss")
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    model = make_model()
    model.build((None, 8, 8, 1))
    optimizer = keras.optimizers.Adam(learning_rate=0.01)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs):
    rows, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(rows, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    rows, labels = inputs
    predictions = model(rows, training=False)
    test_loss.update_state(loss_of_rows(labels, predictions))
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(inputs):
    losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def distributed_test_step(inputs):
    return strategy.run(test_step, args=(inputs,))


history = []
folder = os.path.join(os.environ["TUTORIAL_RESULTS"], f"{os.environ.get('INSITU_TASK', 'alone')}-checkpoints")
for _ in range(EPOCHS):
    total, batches = 0.0, 0
    for batch in train_data:
        total += distributed_train_step(batch)
        batches += 1
    for batch in test_data:
        distributed_test_step(batch)
    checkpoint.save(os.path.join(folder, "ckpt"))
    history.append([total / batches, train_accuracy.result(), test_loss.result(), test_accuracy.result()])
    for metric in (test_loss, train_accuracy, test_accuracy):
        metric.reset_state()

# What was saved is restored without a strategy.
new_model = make_model()
new_model.build((None, 8, 8, 1))
new_accuracy = keras.metrics.SparseCategoricalAccuracy()


@tf.function
def eval_step(rows, labels):
    new_accuracy(labels, new_model(rows, training=False))


new_checkpoint = tf.train.Checkpoint(model=new_model)
new_checkpoint.restore(tf.train.latest_checkpoint(folder)).expect_partial()
for rows, labels in test:
    eval_step(rows, labels)
restored = new_accuracy.result()

# An iterator of fewer steps than the data has.
for _ in range(2):
    iterator = iter(train_data)
    for _ in range(3):
        total = distributed_train_step(next(iterator))
    history.append([total, train_accuracy.result(), 0.0, 0.0])
    train_accuracy.reset_state()


@tf.function
def train_epoch(data):
    total, batches = 0.0, 0
    for batch in data:
        losses = strategy.run(train_step, args=(batch,))
        total += strategy.reduce(distribute.ReduceOp.SUM, losses, axis=None)
        batches += 1
    return total / tf.cast(batches, dtype=tf.float32)


for _ in range(EPOCHS):
    history.append([train_epoch(train_data), train_accuracy.result(), 0.0, 0.0])
    train_accuracy.reset_state()

# Back to what was saved, in the middle of training, and on.
checkpoint.restore(tf.train.latest_checkpoint(folder)).expect_partial()
back = weights_of(model)
again = train_epoch(train_data)
report(history=history, restored=restored, back=back, again=again, weights=weights_of(model))
