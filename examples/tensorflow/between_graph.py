"""Between-graph replication, as in TensorFlow 1: each worker builds the graph, ps tasks hold the variables.

    insitu start --workers 2 --ps 1 - examples/tensorflow between_graph.py

The script reads only TF_CONFIG, and makes its own data.
"""

import json
import os
import time

import numpy as np
import tensorflow.compat.v1 as tf

STEPS = 60
BATCH = 32

tf.disable_v2_behavior()
config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
cluster = tf.train.ClusterSpec(config["cluster"])
server = tf.train.Server(cluster, job_name=role, task_index=index)
if role == "ps":
    server.join()  # doesn't return; insitu stops the task at the end of the job

workers = cluster.num_tasks("worker")
is_chief = index == 0
with tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{index}", cluster=cluster)):
    step = tf.train.get_or_create_global_step()
    features = tf.placeholder(tf.float32, (None, 2))
    targets = tf.placeholder(tf.float32, (None, 1))
    weights = tf.get_variable("weights", (2, 1), initializer=tf.zeros_initializer())
    bias = tf.get_variable("bias", (1,), initializer=tf.zeros_initializer())
    loss = tf.reduce_mean((tf.matmul(features, weights) + bias - targets) ** 2)
    optimizer = tf.train.SyncReplicasOptimizer(
        tf.train.GradientDescentOptimizer(0.1), replicas_to_aggregate=workers, total_num_replicas=workers
    )
    train = optimizer.minimize(loss, global_step=step)


if not is_chief:
    # MonitoredTrainingSession would check only every 30 s if the chief has initialised the variables.
    missing = tf.report_uninitialized_variables(tf.global_variables())
    with tf.Session(server.target) as session:
        while len(session.run(missing)):
            time.sleep(0.1)

# y = 2 a - 3 b + 1; each worker draws its own rows.
random = np.random.default_rng(index)
hooks = [optimizer.make_session_run_hook(is_chief), tf.train.StopAtStepHook(last_step=STEPS)]
learned = None
with tf.train.MonitoredTrainingSession(
    server.target,
    is_chief=is_chief,
    hooks=hooks,
    stop_grace_period_secs=1,  # the chief's thread that waits for gradients doesn't end by itself
) as session:
    while not session.should_stop():
        x = random.normal(size=(BATCH, 2)).astype("float32")
        y = x @ np.array([[2.0], [-3.0]], "float32") + 1.0
        _, value, learned, done = session.run([train, loss, weights, step], {features: x, targets: y})
        if done % 20 == 0:
            print(f"step {done}: loss {value:.5f}")

print(f"worker {index} learned {learned.ravel().round(2)}")
