"""A bare JAX loop over two processes: one program over a global mesh, XLA's collectives over gloo."""

import json
import os
import sys
import time

import models

index, size = models.me()
os.environ["KERAS_BACKEND"] = "jax"

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
coordinator = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0]
jax.distributed.initialize(coordinator, num_processes=size, process_id=index)

import keras  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

kind = sys.argv[1]
keras.utils.set_random_seed(1)
# Keras only describes the network here; the loop, the optimizer and the program are JAX's.
model = models.keras_model(keras, kind)
mesh = Mesh(np.array(jax.devices()), ("data",))
whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))


def spread(value, sharding):
    return jax.make_array_from_process_local_data(sharding, value)


weights = [spread(np.asarray(v), whole) for v in model.trainable_variables]
momentum = [spread(np.zeros(v.shape, "float32"), whole) for v in model.trainable_variables]
others = [spread(np.asarray(v), whole) for v in model.non_trainable_variables]


def loss_of(weights, others, x, y):
    logits, _ = model.stateless_call(weights, others, x, training=True)
    return -jax.nn.log_softmax(logits)[jax.numpy.arange(len(y)), y].mean()


def step(weights, momentum, others, x, y):
    gradients = jax.grad(loss_of)(weights, others, x, y)
    momentum = [0.9 * m - models.LEARNING_RATE * g for m, g in zip(momentum, gradients, strict=True)]
    return [w + m for w, m in zip(weights, momentum, strict=True)], momentum


step = jax.jit(step, donate_argnums=(0, 1))
x, y = models.data(kind, size)
own = slice(index * models.ROWS, (index + 1) * models.ROWS)
batches = [
    (x[s : s + models.ROWS * size][own], y[s : s + models.ROWS * size][own].astype("int32"))
    for s in range(0, len(x), models.ROWS * size)
]
seconds = []
for _epoch in range(3):
    started = time.perf_counter()
    for images, labels in batches:
        weights, momentum = step(weights, momentum, others, spread(images, rows), spread(labels, rows))
    jax.block_until_ready(weights)
    seconds.append(time.perf_counter() - started)
if index == 0:
    print(f"RATE {len(x) / min(seconds[1:])}", flush=True)
jax.distributed.shutdown()
