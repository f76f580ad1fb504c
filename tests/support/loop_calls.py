"""Calls of tf.distribute in a custom loop, on the backend of KERAS_BACKEND: what they gave, as JSON.

    loop_calls.py mirrored OUT      two devices of this machine
    loop_calls.py workers OUT       one task of a job
    loop_calls.py servers OUT       a coordinator, with the server in this process

Each task writes OUT/INDEX.json. The model is linear and starts at zero: a test computes the numbers itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import insitu

if sys.argv[1] == "mirrored":
    insitu.config.set_virtual_devices(2)

import keras
import numpy as np
from matrix_models import value_and_gradients

ROWS, BATCH, RATE = 22, 8, 0.1
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
Y = X @ np.array([[1.0], [-2.0], [0.5]], "float32")


class Batches(keras.utils.PyDataset):
    """Every `count`-th row from `first` on, in batches of `size` rows."""

    def __init__(self, size: int, first: int = 0, count: int = 1) -> None:
        super().__init__()
        self._size, self._x, self._y = size, X[first::count], Y[first::count]

    def __len__(self) -> int:
        return -(-len(self._x) // self._size)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * self._size, (index + 1) * self._size)
        return self._x[part], self._y[part]


def make_model() -> Any:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "linear", kernel_initializer="zeros")])


class Loop:
    """A model, and a step that trains it."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model, self.optimizer = make_model(), keras.optimizers.SGD(RATE)
            self.seen = keras.metrics.Sum()
            self.optimizer.build(self.model.trainable_variables)

    def step(self, x: Any, y: Any) -> Any:
        def forward() -> Any:
            losses = keras.ops.sum((self.model(x, training=True) - y) ** 2, 1)
            return insitu.get_strategy().compute_average_loss(losses)

        loss, gradients = value_and_gradients(forward, self.model)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        self.seen.update_state(keras.ops.ones((keras.ops.shape(x)[0],)))
        return loss

    def train(self, x: Any, y: Any) -> float:
        losses = self.strategy.run(self.step, args=(x, y))
        return float(self.strategy.reduce(insitu.ReduceOp.SUM, losses, axis=None))


def trained(strategy: Any) -> dict[str, Any]:
    loop = Loop(strategy)
    losses = []
    for _ in range(2):
        iterator = iter(strategy.experimental_distribute_dataset(Batches(BATCH)))
        while (step := iterator.get_next_as_optional()).has_value():
            losses.append(loop.train(*step.get_value()))
    weights = np.concatenate([weight.ravel() for weight in loop.model.get_weights()])
    return {"losses": losses, "weights": weights, "seen": loop.seen.result()}


def trained_on_own_data(strategy: Any) -> dict[str, Any]:
    def make(context: Any) -> Any:
        size = context.get_per_replica_batch_size(BATCH)
        return Batches(size, context.input_pipeline_id, context.num_input_pipelines)

    loop = Loop(strategy)
    losses = [loop.train(*step) for step in strategy.distribute_datasets_from_function(make)]
    return {"losses": losses, "seen": loop.seen.result(), "steps": loop.optimizer.iterations.value}


def accumulated(strategy: Any) -> dict[str, Any]:
    """Gradients that one step adds up and another applies, of 5 rows that replicas share unequally."""
    loop = Loop(strategy)
    with strategy.scope():
        sums = [keras.Variable(keras.ops.zeros(v.shape), trainable=False) for v in loop.model.weights]

    def accumulate(x: Any, y: Any) -> None:
        def forward() -> Any:
            return insitu.get_strategy().compute_average_loss(keras.ops.sum((loop.model(x) - y) ** 2, 1))

        for total, gradient in zip(sums, value_and_gradients(forward, loop.model)[1], strict=True):
            total.assign_add(gradient)

    def apply() -> None:
        loop.optimizer.apply([keras.ops.convert_to_tensor(v) for v in sums], loop.model.trainable_variables)

    for step in strategy.experimental_distribute_dataset(Batches(5)):
        strategy.run(accumulate, args=step)
        break
    strategy.run(apply)
    return {"weights": np.concatenate([weight.ravel() for weight in loop.model.get_weights()])}


def places(strategy: Any) -> dict[str, Any]:
    def where() -> list[Any]:
        return [insitu.has_strategy(), insitu.in_cross_replica_context(), insitu.get_strategy() is strategy]

    def step(value: Any) -> Any:
        context = insitu.get_replica_context()
        inside.append([*where(), context.num_replicas_in_sync])
        return value + 10 * context.replica_id_in_sync_group

    inside: list[Any] = []
    with strategy.scope():
        outside = [*where(), insitu.get_replica_context() is None]
    made = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group + 1)
    )
    values = strategy.run(step, args=(made,))
    reduced = [strategy.reduce(op, values, axis=None) for op in ("SUM", insitu.ReduceOp.MEAN)]
    gathered = strategy.gather(strategy.run(lambda v: keras.ops.reshape(v, (1,)), args=(values,)), axis=0)
    mine = [float(value) for value in strategy.experimental_local_results(values)]
    return {"outside": outside, "inside": inside[-1], "reduced": reduced, "gathered": gathered, "mine": mine}


def refused(strategy: Any) -> dict[str, Any]:
    """What the steps say that return a metric's result or an updated variable; one that is alright."""
    loop = Loop(strategy)
    x = np.ones((4, 3), "float32")

    def result(x: Any) -> Any:
        loop.seen.update_state(x)
        return loop.seen.result()

    def updated(x: Any) -> Any:
        loop.step(x, x[:, :1])
        return loop.model.trainable_variables[0]

    def called(x: Any) -> Any:
        loop.seen(x)
        return keras.ops.sum(x)

    told = []
    for step in (result, updated):
        try:
            strategy.run(step, args=(x,))
        except insitu.errors.TrainingError as error:
            told.append(str(error))
    sums = strategy.experimental_local_results(strategy.run(called, args=(x,)))
    return {"told": told, "sums": [float(value) for value in sums], "seen": loop.seen.result()}


def work_of_the_chief(strategy: Any, out: Path, alone: bool) -> dict[str, Any]:
    """What a chief does at the end of its script, `alone` in a job."""
    with strategy.scope():
        model = make_model()
        model.compile(keras.optimizers.SGD(RATE), "mse")
    model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    is_chief = insitu.context().is_chief
    if alone and not is_chief:
        return {}
    found = {"evaluated": model.evaluate(X, Y, batch_size=BATCH, verbose=0)}
    found["predicted"] = model.predict(X, batch_size=BATCH, verbose=0)
    if is_chief:
        model.save(out / "model.keras")
        found["loaded"] = keras.models.load_model(out / "model.keras").predict(X, verbose=0)
    return {**found, "kernel": model.layers[0].kernel.value, "bias": model.layers[0].bias.value}


def coordinated() -> dict[str, Any]:
    strategy = insitu.ParameterServerStrategy()
    loop = Loop(strategy)
    coordinator = insitu.coordinator.ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: Batches(BATCH)))

    def step(iterator: Any) -> Any:
        return loop.strategy.reduce("SUM", loop.strategy.run(loop.step, args=next(iterator)), axis=None)

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(len(Batches(BATCH)))]
    coordinator.join()
    weights = np.concatenate([weight.ravel() for weight in loop.model.get_weights()])
    return {"losses": coordinator.fetch(values), "weights": weights, "seen": loop.seen.result()}


CASES = (trained, trained_on_own_data, accumulated, places, refused)


def main(way: str, out: Path) -> None:
    if way == "servers":
        found = {"coordinated": coordinated()}
    else:
        strategy = insitu.MirroredStrategy() if way == "mirrored" else insitu.MultiWorkerMirroredStrategy()
        found = {case.__name__: case(strategy) for case in CASES}
        found["work_of_the_chief"] = work_of_the_chief(strategy, out, way == "workers")
    listed = {
        case: {name: np.asarray(to_numpy(value)).tolist() for name, value in values.items()}
        for case, values in found.items()
    }
    (out / f"{insitu.context().index}.json").write_text(json.dumps(listed))


def to_numpy(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [to_numpy(each) for each in value]
    return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
