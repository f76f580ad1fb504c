"""Asynchronous training with TensorFlow only: tf.distribute.ParameterServerStrategy with a coordinator.

    insitu start --workers 2 --ps 1 --chief - examples/tensorflow parameter_server.py

The chief coordinates. Workers and ps tasks serve until insitu stops them, once the chief has ended. The
script reads only TF_CONFIG, and makes its own data.
"""

import os
import sys

import numpy as np
import tensorflow as tf

STEPS = 100
BATCH = 32

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    server.join()
    sys.exit(os.EX_SOFTWARE)  # a server's join never returns

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

with strategy.scope():
    weights = tf.Variable(tf.zeros((2, 1)))
    bias = tf.Variable(tf.zeros((1,)))


def rows_of_worker():
    """Return endless batches of y = 2 a - 3 b + 1."""
    x = np.random.default_rng(0).normal(size=(BATCH * 16, 2)).astype("float32")
    y = x @ np.array([[2.0], [-3.0]], "float32") + 1.0
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(256).batch(BATCH)


@tf.function
def dataset_of_worker():
    return rows_of_worker()


@tf.function
def train_step(iterator):
    features, targets = next(iterator)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((features @ weights + bias - targets) ** 2)
    for variable, gradient in zip([weights, bias], tape.gradient(loss, [weights, bias]), strict=True):
        variable.assign_sub(0.1 * gradient)
    return loss


iterator = iter(coordinator.create_per_worker_dataset(dataset_of_worker))
losses = [coordinator.schedule(train_step, args=(iterator,)) for _ in range(STEPS)]
coordinator.join()
learned = f"{weights.numpy().ravel().round(2)} {bias.numpy().round(2)}"
print(f"{STEPS} updates, the last loss {losses[-1].fetch():.5f}: {learned}")
