"""TensorFlow's ParameterServerStrategy with ClusterCoordinator: one task, as TF_CONFIG says."""

import itertools
import json
import os
import sys
import time

import models

task = json.loads(os.environ["TF_CONFIG"])["task"]
if task["type"] == "worker":
    models.keep_to_core(task["index"])

import tensorflow as tf  # noqa: E402

size = sys.argv[1]
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if task["type"] in ("worker", "ps"):
    tf.distribute.Server(
        resolver.cluster_spec(), job_name=task["type"], task_index=task["index"], protocol="grpc"
    ).join()
    sys.exit(os.EX_SOFTWARE)  # a server's join never returns

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
widths = (784, *models.WIDTHS[size], 10)
with strategy.scope():
    kernels = [
        tf.Variable(tf.random.stateless_uniform((a, b), (1, i), -0.05, 0.05))
        for i, (a, b) in enumerate(itertools.pairwise(widths))
    ]
    biases = [tf.Variable(tf.zeros((b,))) for b in widths[1:]]


@tf.function
def dataset_of_worker():
    x, y = models.rows(models.BATCH * 64, 0)
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(models.BATCH).prefetch(4)


@tf.function
def train_step(iterator):
    x, y = next(iterator)
    with tf.GradientTape() as tape:
        for index, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
            x = x @ kernel + bias
            if index + 1 < len(kernels):
                x = tf.nn.relu(x)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x))
    variables = [*kernels, *biases]
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(models.LEARNING_RATE * gradient)
    return loss


iterator = iter(coordinator.create_per_worker_dataset(dataset_of_worker))
steps = 2 * models.STEPS[size] // (5 if size == "large" else 3)
for count in (steps // 5, steps):
    started = time.perf_counter()
    for _ in range(count):
        coordinator.schedule(train_step, args=(iterator,))
    coordinator.join()
print(f"RATE {steps / (time.perf_counter() - started)}", flush=True)
os._exit(0)
