"""Learns sketches of Quick, Draw! and writes three guesses for each held-out one: see README.md.

insitu start --workers 2 quickdraw/train examples/quickdraw answers.py --how fit
"""

import argparse
import csv
import json
import subprocess
import sys
import time

import keras
import loop
import numpy as np
import strategies

import insitu

parser = argparse.ArgumentParser()
parser.add_argument(
    "--how",
    choices=("fit", "loop", "steps"),
    default="fit",
    help="Keras' fit, a custom loop, or global steps by train_and_evaluate",
)
parser.add_argument("--strategy", choices=strategies.CHOICES, default="MultiWorkerMirrored")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=128, help="rows of a step, over all workers")
parser.add_argument("--out", default="answers.csv")
chosen = parser.parse_args()
me = insitu.context()


def as_pictures(features, label):
    """Return images [rows, 28, 28, 1] of both forms: bitmaps of 784 bytes, and rendered strokes."""
    images = features["drawing"] if isinstance(features, dict) else features
    return images.reshape(-1, 28, 28, 1), label


def with_keys(features, label):
    """Return what an answer file needs: the images, their keys, which are -1 for bitmaps, and the labels."""
    images, label = as_pictures(features, label)
    keys = features["key_id"] if isinstance(features, dict) else [-1] * len(label)
    return images, np.array(keys).astype("int64"), label


# The words of the classes 0, 1, ...: the names of the files that were imported.
described = subprocess.check_output([sys.executable, "-m", "insitu", "describe", "quickdraw/train", "--json"])
words = json.loads(described)["labels"]
train = insitu.dataset("quickdraw/train").map(as_pictures).shuffle().batch(chosen.batch)

strategy = strategies.make(chosen.strategy)
layers = keras.layers
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu", name="hidden"),
            layers.Dense(len(words), activation="softmax", name="words"),
        ]
    )
    top3 = keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3")
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy", top3])


class Speed(keras.callbacks.Callback):
    """Counts the rows a second behind the first epoch, in which the step is compiled.

    By the chief's own steps: on parameter servers max_steps may end its last epoch before all of them.
    """

    steps, times = 0, ()

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1

    def on_epoch_end(self, epoch, logs=None):
        self.times = (*self.times, (time.perf_counter(), self.steps))

    def describe(self, rows_per_step):
        if len(self.times) < 2:
            return "one epoch"
        (began, first), (ended, last) = self.times[0], self.times[-1]
        return f"{(last - first) * rows_per_step / (ended - began):,.0f} rows/s"


log, speed = insitu.StepLog(every=50), Speed()
if chosen.how == "fit":
    model.fit(
        train,
        epochs=chosen.epochs,
        verbose=0,
        callbacks=[insitu.BackupAndRestore(), insitu.TensorBoard(histograms=("weights",)), log, speed],
    )
elif chosen.how == "loop":

    def end_epoch(epoch, loss):
        speed.steps += train.num_steps
        speed.on_epoch_end(epoch)
        if me.is_chief:
            print(f"epoch {epoch + 1}: loss {loss:.4f}")

    loop.train(strategy, model, model.optimizer, train, chosen.epochs, end_epoch)
else:
    updates = strategies.updates_of(chosen.strategy, train)
    insitu.estimator.train_and_evaluate(
        model,
        insitu.estimator.TrainSpec(lambda: train, max_steps=chosen.epochs * updates, hooks=[log, speed]),
        insitu.estimator.EvalSpec(
            lambda: insitu.dataset("quickdraw/test").map(as_pictures).batch(512), throttle_secs=30
        ),
    )

if me.is_chief:
    # The chief guesses for all held-out rows, in the order in which they are.
    held_out = insitu.dataset("quickdraw/test", shards=range(me.num_shards)).map(with_keys).batch(512)
    rows, score = 0, 0.0
    with open(chosen.out, "w", newline="") as file:
        answers = csv.writer(file)
        answers.writerow(["key_id", "word"])
        for images, keys, labels in held_out:
            scores = keras.ops.convert_to_numpy(model(images, training=False))
            guesses = np.argsort(-scores, axis=1)[:, :3]
            # Mean average precision: 1 for the right word as the first guess, 1/2 as the second, 1/3.
            score += float(((guesses == labels[:, None]) / np.arange(1, guesses.shape[1] + 1)).sum())
            numbers = np.where(keys < 0, rows + np.arange(len(keys)), keys)
            for key, best in zip(numbers, guesses, strict=True):
                answers.writerow([key, " ".join(words[guess].replace(" ", "_") for guess in best)])
            rows += len(labels)
    print(f"MAP@3 {score / rows:.4f} of {rows} drawings, answers in {chosen.out}")
    print(f"trained {speed.describe(train.rows / train.num_steps)}")
