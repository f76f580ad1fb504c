"""`fit` on parameter servers with the callbacks and the repeated data of scripts for `tf.distribute`.

    servers_fit.py OUT      the first argument is the folder that results are written to

With TUTORIAL_STRATEGY=default it is plain Keras.
"""

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import insitu

out = Path(sys.argv[1])
rows = np.random.default_rng(1).normal(size=(40, 10)).astype("float32")
targets = rows @ np.linspace(-1, 1, 10).astype("float32")
train = tf.data.Dataset.from_tensor_slices((rows, targets)).batch(8).repeat().prefetch(2)

if os.environ.get("TUTORIAL_STRATEGY") == "default":
    strategy = tf.distribute.get_strategy()
else:
    partitioner = insitu.experimental.partitioners.MinSizePartitioner(min_shard_bytes=16, max_shards=2)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = insitu.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
with strategy.scope():
    start = keras.initializers.GlorotUniform(5)
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(1, kernel_initializer=start)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5), loss="mse", steps_per_execution=5)
callbacks = [
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate),
    keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0),
]
history = model.fit(train, epochs=4, steps_per_epoch=10, callbacks=callbacks, verbose=0).history
weights = [weight.tolist() for weight in model.get_weights()]
context = insitu.context()
(out / f"{context.index}.json").write_text(json.dumps({"history": history, "weights": weights}))
