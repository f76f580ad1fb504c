"""Models saved and loaded, with and without a strategy, by Keras and as a SavedModel."""

from __future__ import annotations

import os

import keras
import tensorflow as tf
from tutorial_run import NAME, distribute, images, make_strategy, report, weights_of

strategy = make_strategy()
BATCH = 16
task = os.environ.get("INSITU_TASK", "alone").replace(":", "-")
folder = os.path.join(os.environ["TUTORIAL_RESULTS"], task)
os.makedirs(folder, exist_ok=True)
x, y = images()
train = tf.data.Dataset.from_tensor_slices((x, y)).cache().shuffle(90, seed=3).batch(BATCH)
test = tf.data.Dataset.from_tensor_slices((x[:35], y[:35])).batch(BATCH)


def get_model():
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.Adam(0.01),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
        )
        return model


model = get_model()
losses = [model.fit(train, epochs=2, verbose=0).history["loss"]]
path = os.path.join(folder, "model.keras")
model.save(path)
restored = keras.models.load_model(path)
losses.append(restored.fit(train, epochs=2, verbose=0).history["loss"])

# A job of several workers has no single device. Keras under TensorFlow's strategy for one device begins one
# more iteration of the data, which draws another order than plain Keras.
other = distribute.OneDeviceStrategy("/cpu:0") if NAME == "mirrored" else strategy
with other.scope():
    restored = keras.models.load_model(path)
    losses.append(restored.fit(train, epochs=2, verbose=0).history["loss"])

model = get_model()
saved = os.path.join(folder, "saved")
tf.saved_model.save(model, saved)
loaded = tf.saved_model.load(saved)
infer = loaded.signatures["serving_default"]
inputs = test.map(lambda image, label: image)
for batch in inputs.take(1):
    alone = next(iter(infer(batch).values()))

with strategy.scope():
    loaded = tf.saved_model.load(saved)
    infer = loaded.signatures["serving_default"]
    for batch in strategy.experimental_distribute_dataset(inputs):
        result = strategy.run(infer, args=(batch,))
        break
together = strategy.gather(next(iter(result.values())), axis=0)
report(losses=losses, alone=alone, together=together, weights=weights_of(restored))
