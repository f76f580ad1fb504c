"""A small convolutional network on drawings in Apache Ignite. Runs under `insitu start ignite://...`."""

import argparse
import hashlib
import math

import keras

import insitu

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("address", help="the cache in Ignite, as ignite://HOST:PORT/CACHE")
parser.add_argument("held_out", help="the cache of insitu with rows that aren't trained on")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--brightest", type=float, default=255.0, help="the value of a white pixel")
arguments = parser.parse_args()

strategy = insitu.MultiWorkerMirroredStrategy()
train = insitu.dataset(arguments.address, features="image").shuffle().batch(192)
held_out = insitu.dataset(arguments.held_out, features="image").batch(1024)
side = math.isqrt(math.prod(train.element_spec[0].shape[1:]))


def prepare(images, labels):
    return images.reshape(-1, side, side, 1).astype("float32") / arguments.brightest, labels


with strategy.scope():
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((side, side, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])

model.fit(train.map(prepare), epochs=arguments.epochs)
loss, accuracy = model.evaluate(held_out.map(prepare))

if insitu.context().is_chief:
    bits = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
    print(f"RESULT accuracy={accuracy:.4f} loss={loss:.4f} weights={bits[:16]}")
