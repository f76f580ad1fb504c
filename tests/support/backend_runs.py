"""Trains on the backend of KERAS_BACKEND and prints what came out as one line of JSON.

python backend_runs.py alone FOLDER     every run that one process can do
python backend_runs.py task             one task of several, as its environment says
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from typing import Any

import keras
import numpy as np
from models import image_model, in_shards, mixed_precision

import insitu

POLICIES = ("mixed_float16", "mixed_bfloat16")
BATCH, EPOCHS, ROWS = 64, 3, 193
"""Three full batches and one of a single row, so that the first of two shards has none in that step."""


def rows() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 8, 8, 1)).astype("float32")
    return x, (x.mean((1, 2, 3)) > 0).astype("int64")


def digest(model: Any) -> str:
    values = [keras.ops.convert_to_numpy(v.value) for v in (*model.weights, *model.optimizer.variables)]
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def over(num_shards: int) -> Any:
    """The scope of a strategy whose one process hosts all shards; without any for 0."""
    if not num_shards:
        return contextlib.nullcontext()
    context = in_shards(tuple(range(num_shards)), num_shards)
    return insitu.MultiWorkerMirroredStrategy(context=context).scope()


def train(scope: Any, callbacks: Any = ()) -> dict[str, Any]:
    keras.utils.set_random_seed(7)
    x, y = rows()
    with scope:
        model, drawing = image_model(), drawing_model()
    options: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, validation_data=(x[:51], y[:51]), callbacks=list(callbacks), **options).history
    return {
        "digest": digest(model),
        "history": history,
        "seeds": [keras.ops.convert_to_numpy(v).tolist() for v in model.variables if "seed" in v.path],
        "evaluate": model.evaluate(x, y, verbose=0),
        "predict": model.predict(x[:7], verbose=0).tolist(),
        "single": [float(value) for value in model.train_on_batch(x[:9], y[:9])],
        "drawn": drawn(drawing),
    }


class Drawing(keras.layers.Dropout):
    """Drops in predictions, too."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return super().call(inputs, training=True)


def drawing_model() -> Any:
    model = keras.Sequential([keras.Input((6,)), Drawing(0.5, seed=3)])
    model.compile("sgd", "mse")
    return model


def drawn(model: Any) -> dict[str, Any]:
    """Predictions that draw random numbers, in batches of 4 rows, of 4 and of one, and where that leads."""
    x = np.ones((9, 6), "float32")
    predicted = [model.predict(x, batch_size=4, verbose=0).tolist() for _ in range(2)]
    tested = [model.evaluate(x, 0 * x, batch_size=4, verbose=0) for _ in range(2)]
    seed = keras.ops.convert_to_numpy(model.layers[0].seed_generator.state.value).tolist()
    return {"predicted": predicted, "tested": tested, "seed": seed}


class Failure(Exception):
    pass


class FailAt(keras.callbacks.Callback):
    """Raises at the end of a step, as a task that dies there; reads a weight before, as callbacks do."""

    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self.at = (epoch, batch)
        self.epoch = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == self.at:
            raise Failure


class SeesWeights(keras.callbacks.Callback):
    """A callback in the middle of an epoch finds the weights of that step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(self.model.get_weights()[0].tobytes())


def resumed(folder: str) -> dict[str, Any]:
    """Fails in the middle of the second epoch, after a checkpoint in its middle, and runs again."""
    failed = False
    backup = insitu.BackupAndRestore(folder, save_freq=3)
    try:
        train(over(2), [backup, FailAt(1, 3)])
    except Failure:
        failed = True
        backup._writer.finish()  # what was begun before the failure, so that the next finds the same
    seer = SeesWeights()
    result = train(over(2), [insitu.BackupAndRestore(folder, save_freq=3), seer])
    return {**result, "failed": failed, "steps": len(seer.seen), "distinct": len(set(seer.seen))}


class OwnStepOnJax(keras.Model):
    def train_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, others, optimizer, metrics = state
        x, y = data

        def loss_of(values: Any) -> Any:
            y_pred, moved = self.stateless_call(values, others, x, training=True)
            return self.compute_loss(x, y, y_pred), moved

        (loss, moved), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"my_loss": loss}, (trainable, moved, optimizer, metrics)


class OwnStepOnTorch(keras.Model):
    def train_step(self, data: Any) -> Any:
        import torch

        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"my_loss": loss}


def own_step(num_shards: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(30, 3)).astype("float32"), rng.normal(size=(30, 2)).astype("float32")
    model_class = {"jax": OwnStepOnJax, "torch": OwnStepOnTorch}[keras.backend.backend()]
    with over(num_shards):
        inputs = keras.Input((3,))
        model = model_class(inputs, keras.layers.Dense(2, kernel_initializer="ones")(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": [w.tolist() for w in model.get_weights()]}


def averaged(num_shards: int, *, predict_first: bool = False) -> dict[str, Any]:
    """A fit gives the weights the values of their averages at its end; then training continues."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(30, 3)).astype("float32"), rng.normal(size=(30, 2)).astype("float32")
    with over(num_shards):
        # Not built, so that predict() finds neither variables nor metrics.
        model = keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse", metrics=["mae"])
    predicted = model.predict(x, verbose=0).tolist() if predict_first else []
    model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    single = [float(value) for value in model.train_on_batch(x, y)]
    history = model.fit(x, y, batch_size=10, shuffle=False, verbose=0).history
    return {
        "predicted": predicted,
        "single": single,
        "history": history,
        "weights": [w.tolist() for w in model.get_weights()],
        "wanted": x.sum(1).tolist(),
    }


def misfit() -> str:
    """What is said to a model that can't be combined: a step without its state, a buffer out of sight."""
    if keras.backend.backend() == "jax":

        class WithoutState(OwnStepOnJax):
            def train_step(self, state: Any, data: Any) -> Any:
                return super().train_step(state, data)[0]

        with over(2):
            inputs = keras.Input((3,))
            model = WithoutState(inputs, keras.layers.Dense(2)(inputs))
            model.compile("sgd", "mse")
    else:
        import torch

        with over(2):
            model = keras.Sequential(
                [
                    keras.Input((3,)),
                    keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(3)),
                    keras.layers.Dense(2),
                ]
            )
            model.compile("sgd", "mse")
    try:
        model.fit(np.ones((8, 3), "float32"), np.ones((8, 2), "float32"), verbose=0)
    except insitu.errors.TrainingError as error:
        return str(error)
    return "nothing"


def thawed() -> str:
    """What is said to a model of which other variables are trainable by now, without compile()."""
    with over(2):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.layers[0].trainable = False
        model.compile("sgd", "mse")
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    model.train_on_batch(x, y)
    model.layers[0].trainable = True
    try:
        model.train_on_batch(x, y)
    except insitu.errors.TrainingError as error:
        return str(error)
    return "nothing"


def alone(folder: str) -> dict[str, Any]:
    return {
        "plain": train(over(0)),
        "one": train(over(1)),
        "two": train(over(2)),
        "resumed": resumed(folder),
        "own": [own_step(num_shards) for num_shards in (0, 1, 2)],
        "averaged": [averaged(1), averaged(2), averaged(2, predict_first=True)],
        "mixed": {p: [mixed_precision(lambda n=n: over(n), p) for n in (0, 1, 2)] for p in POLICIES},
        "misfit": misfit(),
        "thawed": thawed() if keras.backend.backend() == "jax" else "",
    }


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        results = alone(sys.argv[2])
    else:
        results = train(insitu.MultiWorkerMirroredStrategy().scope())
    print("RESULTS", json.dumps(results))
