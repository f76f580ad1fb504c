"""Keras' compile and fit. To use another strategy, change the line that makes it.

KERAS_BACKEND=jax python examples/strategies/fit.py
"""

import keras
from data import BATCH, pictures

import insitu

keras.utils.set_random_seed(1)
strategy = insitu.MultiWorkerMirroredStrategy()

x, y = pictures()
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])

model.fit(x, y, batch_size=BATCH, epochs=4, verbose=2)
score = model.evaluate(x, y, batch_size=BATCH, verbose=0)
print(f"accuracy {score[1]:.3f} on {strategy.num_replicas_in_sync} replicas")
