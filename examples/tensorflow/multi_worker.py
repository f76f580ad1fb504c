"""Synchronous training with TensorFlow only: a custom loop under tf.distribute.MultiWorkerMirroredStrategy.

    insitu start --workers 2 - examples/tensorflow multi_worker.py

The script reads only TF_CONFIG, and makes its own data.
"""

import numpy as np
import tensorflow as tf

STEPS = 60
BATCH = 32  # of each worker

strategy = tf.distribute.MultiWorkerMirroredStrategy()
me = strategy.cluster_resolver

# y = 2 a - 3 b + 1; each worker draws its own rows.
random = np.random.default_rng(me.task_id or 0)
x = random.normal(size=(STEPS * BATCH, 2)).astype("float32")
y = x @ np.array([[2.0], [-3.0]], "float32") + 1.0

with strategy.scope():
    weights = tf.Variable(tf.zeros((2, 1)))
    bias = tf.Variable(tf.zeros((1,)))


def replica_step(features, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((features @ weights + bias - targets) ** 2)
    gradients = tape.gradient(loss, [weights, bias])
    gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
    for variable, gradient in zip([weights, bias], gradients, strict=True):
        variable.assign_sub(0.1 * gradient)
    return loss


@tf.function
def train_step(features, targets):
    losses = strategy.run(replica_step, args=(features, targets))
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)


for step in range(STEPS):
    rows = slice(step * BATCH, (step + 1) * BATCH)
    loss = train_step(tf.constant(x[rows]), tf.constant(y[rows]))
    if step % 20 == 19:
        print(f"step {step + 1}: loss {float(loss):.5f}")

learned = f"{weights.numpy().ravel().round(2)} {bias.numpy().round(2)}"
print(f"{strategy.num_replicas_in_sync} replicas learned {learned}")
