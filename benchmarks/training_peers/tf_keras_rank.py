"""tf_keras with tf.distribute.MultiWorkerMirroredStrategy, RING communication."""

import os
import sys

import models

os.environ["TF_USE_LEGACY_KERAS"] = "1"
index, size = models.me()

import tensorflow as tf  # noqa: E402
import tf_keras  # noqa: E402

kind = sys.argv[1]
options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
with strategy.scope():
    model = models.keras_model(tf_keras, kind)
x, y = models.data(kind, size)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(models.ROWS * size)
sharding = tf.data.Options()
sharding.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = dataset.with_options(sharding)
rate = models.rate_of_fit(tf_keras, lambda **more: model.fit(dataset, **more), len(x))
if index == 0:
    print(f"RATE {rate}", flush=True)
