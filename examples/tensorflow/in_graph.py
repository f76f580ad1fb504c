"""In-graph replication, as in TensorFlow 1: one process builds one graph, with a tower on each device.

    insitu start --workers 1 - examples/tensorflow in_graph.py

Each tower computes the gradient of its part of the batch, with the same variables. Their mean updates the
model, with weight decay, a learning rate that decays, and moving averages of the weights. The devices are
parts of the processor. insitu is only needed to start the script.
"""

import time

import numpy as np
import tensorflow.compat.v1 as tf

STEPS, BATCH, TOWERS, EVERY = 200, 128, 4, 50
DECAY = 1e-4

tf.disable_v2_behavior()


def compute_loss(x, y):
    hidden = tf.get_variable("hidden", (2, 8), initializer=tf.glorot_uniform_initializer(seed=1))
    output = tf.get_variable("output", (8, 1), initializer=tf.glorot_uniform_initializer(seed=2))
    error = tf.reduce_mean((tf.matmul(tf.nn.tanh(tf.matmul(x, hidden)), output) - y) ** 2)
    return error + DECAY * (tf.nn.l2_loss(hidden) + tf.nn.l2_loss(output))


features = tf.placeholder(tf.float32, (BATCH, 2))
targets = tf.placeholder(tf.float32, (BATCH, 1))
step = tf.train.get_or_create_global_step()
optimizer = tf.train.GradientDescentOptimizer(tf.train.exponential_decay(0.5, step, 100, 0.9))
towers, losses = [], []
parts = zip(tf.split(features, TOWERS), tf.split(targets, TOWERS), strict=True)
for number, (x, y) in enumerate(parts):
    with tf.device(f"/cpu:{number}"), tf.variable_scope("model", reuse=tf.AUTO_REUSE):
        losses.append(compute_loss(x, y))
        towers.append(optimizer.compute_gradients(losses[-1]))
means = [
    (tf.reduce_mean(tf.stack([gradient for gradient, _ in one]), 0), one[0][1])
    for one in zip(*towers, strict=True)
]
update = optimizer.apply_gradients(means, global_step=step)
averages = tf.train.ExponentialMovingAverage(0.99, step)
with tf.control_dependencies([update]):
    train = averages.apply(tf.trainable_variables())
loss = tf.reduce_mean(losses)

random = np.random.default_rng(0)
devices = tf.ConfigProto(device_count={"CPU": TOWERS})
with tf.train.MonitoredTrainingSession(config=devices) as session:
    began = time.monotonic()
    for number in range(1, STEPS + 1):
        rows = random.uniform(-1, 1, (BATCH, 2)).astype("float32")
        wanted = rows[:, :1] * 0.8 - rows[:, 1:] * 0.4
        _, value = session.run([train, loss], {features: rows, targets: wanted})
        if number % EVERY == 0:
            seconds, began = time.monotonic() - began, time.monotonic()
            speed = f"{BATCH * EVERY / seconds:,.0f} examples/s, {1000 * seconds / EVERY:.2f} ms/batch"
            print(f"step {number}, loss = {value:.5f}, {speed}")
print(f"{TOWERS} towers learned it: loss {value:.5f}")
