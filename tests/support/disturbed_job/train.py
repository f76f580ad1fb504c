"""A script with all of Keras' callbacks, and some of a user's. It knows nothing of faults."""

import collections
import json
import os
import random
from pathlib import Path

import keras
import numpy as np

import insitu

OUT = Path(os.environ["OUT"])
OUT.mkdir(parents=True, exist_ok=True)
me = insitu.context()
kind = os.environ.get("STRATEGY", "mirrored")
strategy = {
    "mirrored": insitu.MultiWorkerMirroredStrategy,
    "servers": lambda: insitu.ParameterServerStrategy(mode="sync"),
    "async": insitu.ParameterServerStrategy,
    "bounded": lambda: insitu.ParameterServerStrategy(mode="bounded", max_staleness=2),
    "backup": lambda: insitu.ParameterServerStrategy(mode="sync", replicas_to_aggregate=1),
    "hybrid": insitu.HybridStrategy,
}[kind]()
random.seed(1)
np.random.seed(1)


def rows(batch):
    """Each row has a key of its own, so that the order in which workers push doesn't count."""
    x = {name: batch[name] for name in ("x", "id")} if kind == "hybrid" else batch["x"]
    return x, batch["y"]


def make_model():
    hidden = [
        keras.layers.Dense(5, "tanh", name="hidden"),
        keras.layers.Dropout(0.2, seed=3),
        keras.layers.Dense(1, name="out"),
    ]
    if kind != "hybrid":
        return keras.Sequential([keras.Input((6,)), *hidden], name="model")
    x, key = keras.Input((6,), name="x"), keras.Input((), dtype="int64", name="id")
    output = keras.layers.Concatenate()([x, insitu.layers.Embedding(3, max_keys=16, name="table")(key)])
    for layer in hidden:
        output = layer(output)
    return keras.Model({"x": x, "id": key}, output, name="model")


with strategy.scope():
    model = make_model()
    average = {} if kind != "mirrored" else {"use_ema": True, "ema_momentum": 0.9}
    model.compile(keras.optimizers.Adam(0.02, **average), "mse", metrics=["mae"])


class Counting(keras.callbacks.Callback):
    """Remembers what it has heard, in each task, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.heard = []
        self.losses = {"train": [], "test": []}
        self.drawn = []

    def on_train_begin(self, logs=None):
        self.heard.append("train begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.heard.append(f"epoch {epoch}")
        self.drawn.append(random.random() + np.random.random())

    def on_train_batch_end(self, batch, logs=None):
        self.losses["train"].append((batch, float(logs["loss"])))

    def on_test_begin(self, logs=None):
        self.heard.append("test begin")

    def on_test_batch_end(self, batch, logs=None):
        self.losses["test"].append((batch, float(logs["loss"])))

    def on_test_end(self, logs=None):
        self.heard.append("test end")

    def on_epoch_end(self, epoch, logs=None):
        self.heard.append(f"end {epoch} {sorted((n, float(v)) for n, v in logs.items())}")

    def on_train_end(self, logs=None):
        self.heard.append(f"train end {sorted((n, float(v)) for n, v in (logs or {}).items())}")


class Tracker:
    """An object of the script's own, with another in it."""

    def __init__(self):
        self.counts = collections.Counter()
        self.rng = np.random.default_rng(5)
        self.drawn = 0.0


class Holding(keras.callbacks.Callback):
    """Changes in place what it has made once."""

    def __init__(self):
        super().__init__()
        self.seen = set()
        self.window = collections.deque(maxlen=3)
        self.tracker = Tracker()
        self.mean = keras.metrics.Mean()

    def on_train_batch_end(self, batch, logs=None):
        self.seen.add(batch)
        self.window.append(float(logs["loss"]))
        self.tracker.counts[batch] += 1
        self.tracker.drawn += self.tracker.rng.random()
        self.mean.update_state(logs["loss"])

    def numbers(self):
        tracker = [sorted(self.tracker.counts.items()), self.tracker.drawn]
        return [sorted(self.seen), list(self.window), tracker, float(self.mean.result())]


class OfTheChief(keras.callbacks.Callback):
    """Does something in the chief alone: remembers, changes nothing of the model, writes whole files."""

    def __init__(self):
        super().__init__()
        self.steps = 0
        self.sums = []
        self.file = None

    def on_train_begin(self, logs=None):
        self.file = open(os.devnull, "w")  # noqa: SIM115

    def on_epoch_begin(self, epoch, logs=None):
        if me.is_chief:
            total = sum(float(np.abs(w).sum()) for w in self.model.get_weights())
            (OUT / f"begin-{epoch}.txt").write_text(f"{total:.9g} {self.steps}")

    def on_train_batch_end(self, batch, logs=None):
        if me.is_chief:
            self.steps += 1
            if self.steps % 4 == 0:
                self.model.save_weights(OUT / f"steps-{self.steps}.weights.h5")

    def on_epoch_end(self, epoch, logs=None):
        if me.is_chief:
            self.sums.append(float(np.abs(self.model.get_weights()[0]).sum()))
            (OUT / f"sums-{epoch}.json").write_text(json.dumps([self.sums, self.steps]))


class LearningRate(keras.callbacks.Callback):
    """Changes a variable by what it was: done twice, it would be another."""

    def on_train_batch_begin(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 0.99)


def callbacks(part):
    folder = str(OUT / part)
    made = [
        Counting(),
        Holding(),
        OfTheChief(),
        LearningRate(),
        keras.callbacks.ModelCheckpoint(folder + "-{epoch:02d}.keras"),
        keras.callbacks.ModelCheckpoint(folder + "-best.keras", monitor="loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(
            folder + "-{epoch:02d}-{batch:02d}.weights.h5", save_weights_only=True, save_freq=3
        ),
        keras.callbacks.CSVLogger(folder + ".csv"),
        keras.callbacks.TensorBoard(folder + "-keras", histogram_freq=1, update_freq=2),
        insitu.TensorBoard(folder + "-insitu", histograms="weights", update_freq=2),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.1),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        insitu.BackupAndRestore(),
    ]
    if kind == "mirrored":
        made.insert(4, keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
    return made


def numbers(history):
    return {name: [float(value) for value in values] for name, values in history.history.items()}


train = insitu.dataset("rows").shuffle().batch(8).map(rows)
held_out = insitu.dataset("rows").batch(16).map(rows)
if me.role == "evaluator":
    insitu.SidecarEvaluator(model, held_out).start()
    raise SystemExit
made = callbacks("first")
first = model.fit(
    train, epochs=int(os.environ.get("EPOCHS", "4")), validation_data=held_out, verbose=2, callbacks=made
)
evaluated = model.evaluate(held_out, verbose=0, return_dict=True)
again = Counting()
second = model.fit(
    train, epochs=2, verbose=0, callbacks=[again, keras.callbacks.CSVLogger(str(OUT / "second.csv"))]
)
predicted = model.predict(held_out, verbose=0)
result = {
    "first": numbers(first),
    "second": numbers(second),
    "evaluated": {name: float(value) for name, value in evaluated.items()},
    "predicted": np.asarray(predicted).tolist(),
    "counted": [made[0].heard, made[0].losses, made[0].drawn],
    "held": made[1].numbers(),
    "again": [again.heard, again.losses],
    "weights": [np.asarray(w).tolist() for w in model.get_weights()],
    "rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
}
(OUT / f"result-{me.task}.json").write_text(json.dumps(result))
if me.is_chief:
    model.save(OUT / "final.keras")
