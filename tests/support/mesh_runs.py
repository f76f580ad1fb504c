"""Trains on several virtual devices of JAX and prints what came out as one line of JSON.

python mesh_runs.py alone            the runs of one process that say most
python mesh_runs.py more FOLDER      the others
python mesh_runs.py task             one task of several, as its environment says
python mesh_runs.py spread           the same, with variables over the devices of each task
python mesh_runs.py lose             the same; task 1 kills itself, and the other says what it met
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 4 if sys.argv[1] in ("alone", "more") else 2)
# Small programs, many of them: what they do is compiled fast.
jax.config.update("jax_disable_most_optimizations", True)

import keras  # noqa: E402
import numpy as np  # noqa: E402
from backend_runs import FailAt, Failure, OwnStepOnJax, SeesWeights, digest  # noqa: E402

import insitu  # noqa: E402
from insitu.train.backends.jax.spmd.program import make_mesh_step  # noqa: E402
from insitu.train.strategies.synchronous import SynchronousStrategy  # noqa: E402

BATCH, EPOCHS, ROWS = 32, 2, 97
"""Three full batches an epoch and one of a single row: fewer than there are devices."""


class OverDevices(SynchronousStrategy):
    def __init__(self, devices: int) -> None:
        super().__init__()
        self.devices = jax.devices()[:devices]

    @property
    def delegates_to_keras(self) -> bool:
        return False  # one replica, whose step is a program over the mesh

    def make_step(self, model: Any, example: Any, *, first: bool) -> Any:
        return make_mesh_step(model, example, self.devices, self.membership)


def over(devices: int) -> Any:
    return OverDevices(devices).scope() if devices else contextlib.nullcontext()


def wide_model() -> Any:
    """Two inputs; a convolution, BatchNorm, Dropout and an embedding."""
    layers, start = keras.layers, keras.initializers.GlorotUniform
    image, words = keras.Input((8, 8, 1), name="image"), keras.Input((3,), dtype="int32", name="words")
    x = layers.Conv2D(4, 3, activation="relu", kernel_initializer=start(1))(image)
    x = layers.Dropout(0.3, seed=5)(layers.Flatten()(layers.BatchNormalization()(x)))
    embedded = layers.Flatten()(layers.Embedding(12, 4, embeddings_initializer=start(3))(words))
    joined = layers.Concatenate()([x, embedded])
    model = keras.Model([image, words], layers.Dense(2, kernel_initializer=start(2))(joined))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def rows() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = {
        "image": rng.normal(size=(ROWS, 8, 8, 1)).astype("float32"),
        "words": rng.integers(0, 12, (ROWS, 3)),
    }
    return x, rng.integers(0, 2, ROWS)


def train(scope: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(7)
    x, y = rows()
    # Batches of sizes that were seen before: each size is a program of its own.
    some = ({name: value[: BATCH + 1] for name, value in x.items()}, y[: BATCH + 1])
    one = ({name: value[:BATCH] for name, value in x.items()}, y[:BATCH])
    with scope:
        model = wide_model()
    options: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, validation_data=some, **options).history
    return {
        "digest": digest(model),
        "weights": [w.ravel().tolist() for w in model.get_weights()],
        "history": history,
        "evaluate": model.evaluate(x, y, verbose=0),
        "predict": model.predict(x, verbose=0).ravel().tolist(),
        "single": [float(value) for value in model.train_on_batch(*one)],
    }


def small_model(optimizer: Any, **options: Any) -> Any:
    inputs = keras.Input((3,))
    x = keras.layers.Dropout(0.5, seed=1)(keras.layers.Dense(4, kernel_initializer="ones")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2, kernel_initializer="ones")(x))
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def small_rows() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(31, 3)).astype("float32"), rng.normal(size=(31, 2)).astype("float32")


def train_small(
    scope: Any, optimizer: Any, callbacks: Any = (), rows: int = 31, **options: Any
) -> dict[str, Any]:
    keras.utils.set_random_seed(7)
    with scope:
        model = small_model(optimizer, **options)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    x, y = (array[:rows] for array in small_rows())
    history = model.fit(x, y, epochs=2, **options).history
    return {
        "digest": digest(model),
        "history": history,
        "weights": [w.ravel().tolist() for w in model.get_weights()],
    }


def optimized(devices: int) -> dict[str, Any]:
    optimizer = keras.optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=1.0, use_ema=True, gradient_accumulation_steps=2
    )
    return train_small(over(devices), optimizer)


def resumed(folder: str) -> dict[str, Any]:
    """Fails in the middle of the second epoch, after a checkpoint in its middle, and runs again."""
    failed = False
    backup = insitu.BackupAndRestore(folder, save_freq=2)
    try:
        train_small(over(3), "adam", [backup, FailAt(1, 2)])
    except Failure:
        failed = True
        backup._writer.finish()  # what was begun before the failure, so that the next finds the same
    seer = SeesWeights()
    again = train_small(over(3), "adam", [insitu.BackupAndRestore(folder, save_freq=2), seer])
    return {
        "failed": failed,
        "steps": len(seer.seen),
        "again": again["digest"],
        "undisturbed": train_small(over(3), "adam")["digest"],
    }


def own_step(devices: int) -> dict[str, Any]:
    """A train_step of the user's own, and a loss that isn't a mean."""
    with over(devices):
        inputs = keras.Input((3,))
        model = OwnStepOnJax(inputs, keras.layers.Dense(2, kernel_initializer="ones")(inputs))
        model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="sum"))
    history = model.fit(*small_rows(), batch_size=10, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": [w.ravel().tolist() for w in model.get_weights()]}


def two_fits() -> list[int]:
    """How many programs a step has compiled after one fit and after two. The optimizer gives variables the
    values of others at the end of the first."""
    with over(2):
        model = small_model(keras.optimizers.SGD(0.1, use_ema=True))
    counts = []
    for _ in range(2):
        model.fit(*small_rows(), batch_size=8, epochs=2, verbose=0)
        counts.append(model._insitu_trainer._train_executor._train._cache_size())
    return counts


def task() -> dict[str, Any]:
    strategy = insitu.MultiWorkerMirroredStrategy("xla")
    return {**train(strategy.scope()), "devices": len(jax.devices())}


def spread_task() -> dict[str, Any]:
    """Rows over the tasks, variables over the devices of each."""
    strategy = insitu.ModelParallelStrategy(mesh={"data": 2, "model": 2})
    return {**train(strategy.scope()), "devices": len(jax.devices()), "loop": loop(strategy)}


def loop(strategy: Any) -> Any:
    """A custom loop of a model that knows nothing of other rows."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        layers = [keras.layers.Dense(n, kernel_initializer="ones") for n in (4, 2)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        optimizer = keras.optimizers.Adam(0.01)

    def loss_of(trainable: Any, x: Any, y: Any) -> Any:
        outputs, _ = model.stateless_call(trainable, [], x)
        return strategy.compute_average_loss(keras.ops.mean((outputs - y) ** 2, axis=-1))

    def step(x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)([v.value for v in model.trainable_variables], x, y)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    data = strategy.distribute_dataset(GlobalBatches())
    losses = [float(strategy.reduce("sum", strategy.run(step, batch))) for batch in data]
    shapes = [list(v.value.addressable_shards[0].data.shape) for v in model.trainable_variables]
    return {"losses": losses, "weights": [w.ravel().tolist() for w in model.get_weights()], "shapes": shapes}


class GlobalBatches(keras.utils.PyDataset):
    """Batches of 10 rows, and one of a single row, of which one of two tasks has none."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return tuple(array[10 * index : 10 * index + 10] for array in small_rows())


class KillsItself(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def lose() -> dict[str, Any]:
    strategy = insitu.MultiWorkerMirroredStrategy("xla")
    last = strategy.membership.context.index == 1
    try:
        train_small(strategy.scope(), "sgd", [KillsItself()] if last else [])
    except insitu.errors.PeerLost as error:
        return {"lost": error.task}
    return {}


def spread() -> dict[str, Any]:
    """Rows over two devices, the variables of each replica over two others; also within the scope."""
    strategy = insitu.ModelParallelStrategy(mesh={"data": 2, "model": 2})
    with strategy.scope():
        by_rule = train(contextlib.nullcontext())
    by_map = insitu.ModelParallelStrategy({"dense.*/kernel": (None, "model")}, mesh={"data": -1, "model": 2})
    with by_map.scope():
        model = small_model("adam")
        model.fit(*small_rows(), batch_size=8, verbose=0)
    variables = [*model.weights, *model.optimizer.variables]
    return {
        **by_rule,
        "shards": {v.path: list(v.value.addressable_shards[0].data.shape) for v in variables},
    }


def refused_spreads() -> list[str]:
    """What is said about meshes and layout maps that don't fit."""
    said = []
    for layout_map, mesh in (
        (None, {"data": 3, "model": 2}),
        ({".*kernel": ("rows",)}, None),
        ({".*kernel": ("model",)}, None),
        ({"(": ("model",)}, None),
    ):
        try:
            with insitu.ModelParallelStrategy(layout_map, mesh=mesh).scope():
                small_model("sgd")
        except insitu.errors.InputError as error:
            said.append(str(error))
    return said


def alone() -> dict[str, Any]:
    return {
        "plain": train(over(0)),
        "three": train(over(3)),
        "own": [own_step(devices) for devices in (0, 4)],
        "spread": spread(),
        "refused": refused_spreads(),
        "loop": loop(insitu.OneDeviceStrategy("cpu:0")),
    }


def more(folder: str) -> dict[str, Any]:
    return {
        "plain": train(over(0)),
        "one": train(over(1)),
        "eager": [train_small(over(n), "sgd", rows=8, run_eagerly=n > 0) for n in (0, 2)],
        "resumed": resumed(folder),
        "optimized": [optimized(devices) for devices in (0, 2)],
        "two matches": two_fits(),
    }


if __name__ == "__main__":
    what = {"alone": alone, "more": more, "task": task, "spread": spread_task, "lose": lose}[sys.argv[1]]
    print("RESULTS", json.dumps(what(*sys.argv[2:])))
