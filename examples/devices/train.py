"""Learns handwritten digits on all devices of one machine: see README.md.

INSITU_VIRTUAL_DEVICES=cpu:4 insitu start --workers 1 digits/train examples/devices train.py
"""

import argparse

import keras

import insitu

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch", type=int, default=96, help="rows of a step, over all devices")
parser.add_argument("--log-every", type=int, default=25)
chosen = parser.parse_args()

# Each device has a tower: a copy of the variables. It computes the gradient of its part of the batch.
strategy = insitu.MirroredStrategy()
train = insitu.dataset("digits/train").shuffle().batch(chosen.batch)
held_out = insitu.dataset("digits/test").batch(256)

layers = keras.layers
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((28, 28)),
            layers.Rescaling(1 / 255),
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(3e-3, chosen.epochs * train.num_steps)
    # Of each weight the optimizer keeps a moving average, which takes its place at the end of the training.
    optimizer = keras.optimizers.AdamW(rate, weight_decay=1e-4, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

model.fit(
    train,
    epochs=chosen.epochs,
    verbose=0,
    callbacks=[
        insitu.BackupAndRestore(),
        insitu.TensorBoard(histograms=("weights",), update_freq=10),
        insitu.StepLog(chosen.log_every),
    ],
)
loss, accuracy = model.evaluate(held_out, verbose=0)
print(f"held-out accuracy {accuracy:.4f} on {strategy.num_replicas_in_sync} devices")
