"""A small convolutional network on images with labels. Runs under `insitu start`, and as plain `python`."""

import argparse
import hashlib
import math

import keras

import insitu

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("cache", help="the cache's name: NAME/train and NAME/test are read")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=96, help="rows of a step over all workers")
parser.add_argument("--brightest", type=float, default=255.0, help="the value of a white pixel")
arguments = parser.parse_args()

strategy = insitu.MultiWorkerMirroredStrategy()
train = insitu.dataset(f"{arguments.cache}/train").shuffle().batch(arguments.batch)
held_out = insitu.dataset(f"{arguments.cache}/test").batch(1024)
side = math.isqrt(math.prod(train.element_spec[0].shape[1:]))


def prepare(images, labels):
    return images.reshape(-1, side, side, 1).astype("float32") / arguments.brightest, labels


with strategy.scope():
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((side, side, 1)),
            layers.Conv2D(24, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(48, 3, padding="same", activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(96, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

# BackupAndRestore writes the checkpoints that a restarted job continues from. The rest is plain Keras.
model.fit(train.map(prepare), epochs=arguments.epochs, callbacks=[insitu.BackupAndRestore(save_freq=20)])
loss, accuracy = model.evaluate(held_out.map(prepare))

if insitu.context().is_chief:
    bits = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
    print(f"RESULT accuracy={accuracy:.4f} loss={loss:.4f} weights={bits[:16]}")
