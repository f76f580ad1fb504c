"""Trains on three virtual devices of the backend of KERAS_BACKEND and prints as JSON how far the weights of
each case are from those of one process that computes three shards one after the other (0 is bit for bit)."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import insitu

insitu.config.set_virtual_devices(3)

import keras  # noqa: E402
import numpy as np  # noqa: E402
from matrix_models import step_by_hand  # noqa: E402
from models import image_model, in_shards, weights  # noqa: E402

from insitu.base.paths import Paths  # noqa: E402
from insitu.grid import import_cache  # noqa: E402

X = np.random.default_rng(0).normal(size=(70, 8, 8, 1)).astype("float32")
Y = (X.mean((1, 2, 3)) > 0).astype("int64")
BATCH = 23
"""The last batch has one row, so that two of three devices have none."""


def reference() -> Any:
    return insitu.MultiWorkerMirroredStrategy(context=in_shards((0, 1, 2), 3))


def difference(mine: Any, theirs: Any) -> float:
    """The largest difference of a weight or a log, relative to the largest weight; 0 is bit for bit."""
    pairs = list(zip(weights(mine[0]), weights(theirs[0]), strict=True))
    largest = max(float(np.abs(b).max()) for _, b in pairs)
    apart = max(float(np.abs(a - b).max()) for a, b in pairs) / largest
    logs = [(a, b) for name, b in theirs[1].items() for a, b in zip(mine[1][name], b, strict=True)]
    return max(apart, *(abs(a - b) for a, b in logs))


def images(strategy: Any, **compile_options: Any) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = image_model(**compile_options)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "validation_data": (X[:22], Y[:22])}
    history = model.fit(X, Y, epochs=2, **options).history
    predicted = model.predict(X[:7], batch_size=4, verbose=0)
    assert predicted.shape == (7, 2)
    assert model.predict(X[:1], verbose=0).shape == (1, 2)
    return model, history


def all_of_the_optimizer(strategy: Any) -> Any:
    return images(
        strategy,
        optimizer=keras.optimizers.AdamW(
            1e-2, clipnorm=0.5, use_ema=True, ema_overwrite_frequency=3, gradient_accumulation_steps=2
        ),
    )


def half_precision(strategy: Any) -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return images(strategy, metrics=["accuracy"])
    finally:
        keras.config.set_dtype_policy("float32")


def many_inputs_and_outputs(strategy: Any) -> Any:
    keras.utils.set_random_seed(4)
    with strategy.scope():
        a, b = keras.Input((8, 8, 1), name="a"), keras.Input((), dtype="int32", name="b")
        embedded = keras.layers.Embedding(5, 3, name="table")(b)
        joined = keras.layers.Concatenate()([keras.layers.Flatten()(a), embedded])
        outputs = {"u": keras.layers.Dense(2, name="u")(joined), "v": keras.layers.Dense(1, name="v")(joined)}
        model = keras.Model({"a": a, "b": b}, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9), {"u": loss, "v": "mse"}, metrics={"v": ["mae"]}
        )
    x = {"a": X, "b": (np.arange(70) % 5).astype("int32")}
    y = {"u": Y, "v": X.mean((1, 2, 3), keepdims=True)[:, 0, 0]}
    sample_weight = {"u": np.linspace(0, 1, 70), "v": np.linspace(1, 0, 70)}
    history = model.fit(x, y, sample_weight=sample_weight, batch_size=BATCH, epochs=2, verbose=0).history
    return model, history


def changes_between_steps(strategy: Any) -> Any:
    """A callback changes the learning rate and a weight; a second fit follows other weights."""

    class Meddler(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.model.optimizer.learning_rate.assign(5e-3)
                self.model.layers[-1].bias.assign([0.5, -0.5])

    model, _ = images(strategy)
    model.set_weights([0.9 * w for w in model.get_weights()])
    options = {"batch_size": BATCH, "shuffle": True, "verbose": 0, "callbacks": [Meddler()]}
    return model, model.fit(X, Y, epochs=2, **options).history


def rows_of_a_cache(strategy: Any) -> Any:
    """The dataset has one shard, whose batches are split over the devices."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = image_model()
    data = insitu.dataset("images").batch(BATCH).map(lambda x, y: (x, y))
    return model, model.fit(data, epochs=2, verbose=0, validation_data=data).history


def rows_of_arrays(strategy: Any) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = image_model()
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    return model, model.fit(X, Y, validation_data=(X, Y), **options).history


def by_hand(strategy: Any) -> Any:
    """A loop of its own that trains and, with another step, evaluates."""
    model, step, accuracy = steps_by_hand(strategy)

    def test(x: Any, y: Any) -> None:
        accuracy.update_state(y, model(x, training=False))

    rows = [(X[start : start + BATCH], Y[start : start + BATCH]) for start in range(0, len(X), BATCH)]
    data, losses, accuracies = strategy.distribute_dataset(Batches(rows)), [], []
    for _ in range(2):
        accuracy.reset_state()
        losses += [float(strategy.reduce("sum", strategy.run(step, batch))) for batch in data]
        for batch in data:
            strategy.run(test, batch)
        accuracies.append(float(accuracy.result()))
        # Between steps the variables may be given other values.
        model.layers[-1].bias.assign([0.5, -0.5])
    return model, {"loss": losses, "accuracy": accuracies}


def steps_by_hand(strategy: Any) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model, optimizer = image_model(), keras.optimizers.Adam(1e-2)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    return model, step_by_hand(strategy, model, optimizer), accuracy


class Batches(keras.utils.PyDataset):
    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def devices_missed(strategy: Any) -> int:
    """How many of the three devices have no part in a step of a loop."""
    _, step, _ = steps_by_hand(strategy)
    for batch in strategy.distribute_dataset(Batches([(X[:BATCH], Y[:BATCH])])):
        losses = strategy.local_results(strategy.run(step, batch))
    if keras.backend.backend() == "tensorflow":
        # What a function returns may be brought to one device: its graph says where it was computed.
        ((program,),) = strategy._loop_runner._programs.values()
        graph = program._step._devices._train_all._compiled.get_concrete_function().graph
        return 3 - len({op.device for op in graph.get_operations() if op.type == "Conv2D"})
    return 3 - len({device for loss in losses for device in loss.devices()})


@functools.cache
def of_reference(run: Callable[..., Any], **options: Any) -> Any:
    return run(reference(), **options)


def between(make: Callable[[], Any], run: Callable[..., Any], **options: Any) -> float:
    return difference(run(make(), **options), of_reference(run, **options))


def tensorflow_only(results: dict[str, float], everything: bool) -> None:
    from insitu.train.backends import active_backend
    from insitu.train.custom_loop.steps import MultiDeviceExchangeStep
    from insitu.train.replicated.step import MultiDeviceStep

    class BesideOthers(insitu.MirroredStrategy):
        """As in a job of several tasks."""

        def make_step(self, model: Any, example: Any, *, first: bool) -> Any:
            return MultiDeviceStep(self._replica(model, example), self._membership.lockstep)

        def make_loop_step(self, model: Any, example: Any) -> Any:
            devices = [device.handle() for device in self.devices]
            replica = active_backend().make_device_loop_replica(
                model, example, devices, self.membership.context.shards, None
            )
            return MultiDeviceExchangeStep(model, replica, self._membership)

    results["beside others"] = between(BesideOthers, images)
    if not everything:
        return
    results["by hand beside others"] = between(BesideOthers, by_hand)
    results["half_precision"] = between(insitu.MirroredStrategy, half_precision)
    results["jit"] = between(insitu.MirroredStrategy, images, jit_compile=True)
    results["eager"] = between(insitu.MirroredStrategy, images, run_eagerly=True)
    model, _ = images(insitu.MirroredStrategy())
    mirrors = model._insitu_mirrors
    copies = [[c.numpy().tobytes() for c in site] for site in mirrors._copies]
    metrics = {id(v) for v in model.metrics_variables}
    results["copies differ"] = sum(
        len({site[i] for site in copies}) != 1
        for i, variable in enumerate(mirrors.variables)
        if id(variable) not in metrics
    )


def torch_only(results: dict[str, float]) -> None:
    from insitu.train.backends.torch.several_devices import TorchMultiDeviceReplica
    from insitu.train.replicated.step import MultiDeviceStep

    class Copying(insitu.CentralStorageStrategy):
        """As on GPUs, where each device has memory of its own."""

        def make_step(self, model: Any, example: Any, *, first: bool) -> Any:
            devices = [device.handle() for device in self.devices]
            return MultiDeviceStep(
                TorchMultiDeviceReplica(model, example, devices, copy=True), self._membership.lockstep
            )

    results["copies"] = between(Copying, images)


def import_images() -> None:
    folder = Path(sys.argv[1])
    np.savez(folder / "images.npz", x=X, label=Y)
    import_cache(Paths(folder / "home"), "images", [str(folder / "images.npz")], partitions=1)


def main() -> None:
    backend, everything = keras.backend.backend(), "all" in sys.argv
    central = insitu.CentralStorageStrategy
    results: dict[str, float] = {}
    results["central"] = between(lambda: central(["cpu:2", "cpu:1", "cpu:0"], "cpu:1"), images)
    if backend == "jax" or everything:
        results["central by hand"] = between(lambda: central(["cpu:2", "cpu:1", "cpu:0"], "cpu:1"), by_hand)
    if backend != "torch":
        results["mirrored by hand"] = between(insitu.MirroredStrategy, by_hand)
        results["devices missed"] = devices_missed(insitu.MirroredStrategy())
        if backend == "jax" or everything:
            results["devices missed (central)"] = devices_missed(central())
    if backend == "jax":
        # One program for the global batch: BatchNorm and Dropout see all of its rows.
        results["mirrored"] = difference(
            images(insitu.MirroredStrategy()), images(insitu.OneDeviceStrategy("cpu:0"))
        )
    else:
        cases = [many_inputs_and_outputs, changes_between_steps]
        cases += [all_of_the_optimizer] if everything else []
        strategy = insitu.MirroredStrategy if backend == "tensorflow" else central
        for run in cases:
            results[run.__name__] = between(strategy, run)
    if backend == "torch":
        results["mirrored"] = between(insitu.MirroredStrategy, images)
    if backend != "jax":
        import_images()
        results["cache"] = difference(
            rows_of_a_cache(insitu.MirroredStrategy()), rows_of_arrays(insitu.MirroredStrategy())
        )
    if backend == "tensorflow":
        tensorflow_only(results, everything)
    if backend == "torch":
        torch_only(results)
    print("RESULTS", json.dumps(results))


if __name__ == "__main__":
    main()
