"""What the cases of `keras_cases` are made of: the run, the list of cases, small models and data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

BACKENDS = ("tensorflow", "jax", "torch")
STRATEGIES = ("one", "mirrored", "workers")
SEVERAL = ("mirrored", "workers")
"""With one replica Keras itself runs: cases about how replicas share a batch leave it out."""
BATCH = 8
FIT: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}


@dataclass(frozen=True)
class Run:
    """One execution of a case."""

    #: "plain", or one of STRATEGIES
    strategy: str
    #: how many parts each global batch is cut into
    replicas: int
    #: the number of this process among those that train one model together
    index: int
    #: the folder of this run of the case; all processes share it
    folder: Path
    #: returns the context manager in which a model is made and compiled
    scope: Callable[[], AbstractContextManager[Any]]
    #: what all random numbers of the case derive from
    seed: int = 7

    @property
    def backend(self) -> str:
        return str(keras.backend.backend())

    def rng(self, more: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.seed, more])

    def rows(self, count: int = 37, features: int = 4) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a regression. By default the last of five batches has five rows."""
        rng = self.rng()
        x = rng.normal(size=(count, features)).astype("float32")
        noise = 0.1 * rng.normal(size=(count, 1)).astype("float32")
        return x, x.sum(1, keepdims=True) * 0.5 + noise

    def labels(self, count: int = 37, classes: int = 3) -> np.ndarray:
        return self.rng(1).integers(0, classes, count)


@dataclass(frozen=True)
class Case:
    """A small training and where it applies."""

    #: name of the case
    name: str
    #: does the training and returns what is compared: numbers, arrays, texts in dicts and lists
    train: Callable[[Run], dict[str, Any]]
    #: backends that have the feature
    backends: tuple[str, ...] = BACKENDS
    #: strategies for which the case means anything
    strategies: tuple[str, ...] = STRATEGIES
    #: keys of the result that differ by nature where each replica computes its rows by itself
    apart: frozenset[str] = frozenset()
    #: keys of the result that differ by nature under any strategy, such as an order drawn at random
    free: frozenset[str] = frozenset()

    def compared(self, strategy: str, backend: str, index: int, keys: Iterable[str]) -> set[str]:
        """Those of `keys` that must be the same as in plain Keras. Keys that begin with "chief" hold what
        only the chief knows, such as the files of callbacks."""
        left_out = set(self.free)
        # On JAX one program computes what one device would for the global batch.
        if strategy == "workers" or (strategy == "mirrored" and backend != "jax"):
            left_out |= self.apart
        return {key for key in keys if key not in left_out and not (index and key.startswith("chief"))}


CASES: dict[str, Case] = {}


def case(
    *,
    backends: Iterable[str] = BACKENDS,
    strategies: Iterable[str] = STRATEGIES,
    apart: Iterable[str] = (),
    free: Iterable[str] = (),
) -> Callable[[Callable[[Run], dict[str, Any]]], Callable[[Run], dict[str, Any]]]:
    """Puts a function into the list of cases, under its own name."""

    def add(train: Callable[[Run], dict[str, Any]]) -> Callable[[Run], dict[str, Any]]:
        name = train.__name__
        if name in CASES:
            raise ValueError(f"two cases are named {name}")
        CASES[name] = Case(name, train, tuple(backends), tuple(strategies), frozenset(apart), frozenset(free))
        return train

    return add


def dense(outputs: int = 1, **options: Any) -> Any:
    """A network of two layers over four features."""
    layers = keras.layers
    hidden = layers.Dense(5, "tanh", name="hidden")
    return keras.Sequential([keras.Input((4,)), hidden, layers.Dense(outputs, name="out", **options)])


def compiled(model: Any, optimizer: Any = None, loss: Any = "mse", **options: Any) -> Any:
    """`model`, compiled. On TensorFlow without XLA by default, which takes a second for each function."""
    if keras.backend.backend() == "tensorflow":
        options.setdefault("jit_compile", False)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9) if optimizer is None else optimizer, loss, **options
    )
    return model


def sparse_loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def numbers(value: Any) -> Any:
    """A variable or tensor as a NumPy array."""
    return np.array(keras.ops.convert_to_numpy(value))


def weights(model: Any) -> dict[str, Any]:
    """All variables of the model but random seeds, in the order of Keras."""
    found = [v for v in model.weights if "seed" not in v.path]
    return {f"{index} {v.path.rsplit('/', 1)[-1]}": numbers(v) for index, v in enumerate(found)}


def iterations(model: Any) -> int:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return int(numbers(optimizer.iterations))


def outcome(model: Any, history: Any = None, **more: Any) -> dict[str, Any]:
    """What nearly every case compares: weights, number of updates, history."""
    result = {"weights": weights(model), "iterations": iterations(model), **more}
    if history is not None:
        result["history"] = history.history if hasattr(history, "history") else history
        result["epochs"] = list(getattr(history, "epoch", ()))
    return result


def regress(run: Run, fit: dict[str, Any] | None = None, make: Any = dense, **compile_options: Any) -> Any:
    """(model, history) of a regression over arrays, with these options of `fit` and `compile`."""
    x, y = run.rows()
    with run.scope():
        model = compiled(make(), **compile_options)
    return model, model.fit(x, y, **{**FIT, **(fit or {})})


@keras.saving.register_keras_serializable("cases")
class SumOf(keras.metrics.Metric):
    """The sum of all labels that were seen since the metric was reset: rows lost or repeated change it."""

    def __init__(self, name: str = "labels", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float32")))

    def result(self) -> Any:
        return keras.ops.convert_to_tensor(self.total)


class Endless(Exception):
    """A loop that should have ended long ago."""


class Limit(keras.callbacks.Callback):
    """Raises Endless after so many batches, long before the deadline."""

    def __init__(self, batches: int = 300) -> None:
        super().__init__()
        self.left = batches

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Endless("hundreds of batches where a few were asked for")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._count()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._count()

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._count()


class Counts(keras.callbacks.Callback):
    """Counts the events that it hears, with the largest number of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, int] = {}
        self.last: dict[str, int] = {}

    def _hear(self, event: str, number: int = 0) -> None:
        self.heard[event] = self.heard.get(event, 0) + 1
        self.last[event] = max(self.last.get(event, 0), int(number))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._hear("epoch_begin", epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._hear("epoch_end", epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._hear("train_batch_begin", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._hear("train_batch_end", batch)

    def on_test_begin(self, logs: Any = None) -> None:
        self._hear("test_begin")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._hear("test_batch_end", batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._hear("predict_batch_end", batch)

    def on_train_end(self, logs: Any = None) -> None:
        self._hear("train_end")

    def told(self) -> dict[str, Any]:
        return {"heard": dict(sorted(self.heard.items())), "last": dict(sorted(self.last.items()))}


@dataclass
class Batches:
    """Cuts arrays into batches, as often as it is asked."""

    arrays: tuple[np.ndarray, ...]
    size: int = BATCH
    #: numbers of the batches that were given out
    given: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return -(-len(self.arrays[0]) // self.size)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        self.given.append(index)
        return tuple(array[index * self.size : (index + 1) * self.size] for array in self.arrays)

    def once(self) -> Any:
        for index in range(len(self)):
            yield self[index]

    def forever(self) -> Any:
        while True:
            yield from self.once()
