"""Trains as a description in plain data says, and returns everything that can be compared.

A description has the fields `seed`, `policy`, `model`, `compile` and `calls`. With `nudged`, inputs and first
weights differ by a rounding error, which shows whether the training is stable. See `random_models`, which
draws them, and `described_models`, which makes the model.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from typing import Any

import described_models as models
import keras
import numpy as np
from described_models import Description
from keras_case_tools import Case, Counts, Limit, Run, iterations, numbers, weights

map_structure = keras.tree.map_structure

HALF = ("mixed_float16", "mixed_bfloat16")
RANDOM_LAYERS = ("Dropout", "SpatialDropout1D", "GaussianNoise", "GaussianDropout")


def described_case(description: Description) -> Case:
    """The training as a case of the comparison with plain Keras."""
    apart = frozenset({"exact", "half", "chief"}) if is_apart(description) else frozenset()
    return Case("random", lambda run: train(run, description), apart=apart)


def layers_of(description: Description) -> list[Any]:
    """[name, options] of all layers but the outputs'."""
    return [layer for tower in description["model"]["towers"] for layer in tower["layers"]]


def is_apart(description: Description) -> bool:
    """Whether replicas compute other numbers than one device by design: random numbers, statistics and
    masks of a replica's own rows. Only shapes are compared then."""
    names = {name for name, _ in layers_of(description)}
    return bool(names & {"BatchNormalization", *RANDOM_LAYERS}) or "ignore_class" in json.dumps(description)


def train(run: Run, description: Description) -> dict[str, Any]:
    """What came out: `exact` or `half`, by how precise it must be; `shapes`; `chief`, files of callbacks."""
    keras.config.set_dtype_policy(description["policy"])
    try:
        training = Training(run, description)
        results = [training.call(call) for call in description["calls"]]
        model = training.model
        found = {
            "calls": results,
            "weights": weights(model),
            "optimizer": [numbers(v) for v in model.optimizer.variables if "seed" not in v.path],
            "iterations": iterations(model),
            "rate": numbers(model.optimizer.learning_rate),
        }
        key = "half" if description["policy"] in HALF else "exact"
        return {key: found, "shapes": _shapes(found), "chief": {key: training.files()}}
    finally:
        keras.config.set_dtype_policy("float32")


def _shapes(found: Any) -> Any:
    """Like `found`, with the shape in place of each number."""
    if isinstance(found, dict):
        return {name: _shapes(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_shapes(value) for value in found]
    return str(np.shape(found))


# Data


class Rows:
    """Rows of all arrays of a structure, cut into batches."""

    def __init__(self, data: tuple[Any, ...], size: int) -> None:
        self.data, self.size = data, size
        self.rows = len(keras.tree.flatten(data)[0])

    def __len__(self) -> int:
        return -(-self.rows // self.size)

    def batch(self, index: int) -> tuple[Any, ...]:
        first = index * self.size
        return tuple(map_structure(lambda leaf: leaf[first : first + self.size], self.data))

    def once(self) -> Iterator[Any]:
        for index in range(len(self)):
            yield self.batch(index)

    def forever(self) -> Iterator[Any]:
        while True:
            yield from self.once()


class Numbered(keras.utils.PyDataset):
    """Batches by their numbers."""

    def __init__(self, rows: Rows, endless: bool, turns: bool, **options: Any) -> None:
        super().__init__(**options)
        self.rows, self.endless, self.turns = rows, endless, turns
        self.turned = 0

    @property
    def num_batches(self) -> int | None:
        return None if self.endless else len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows.batch((index + self.turned) % len(self.rows))

    def on_epoch_end(self) -> None:
        self.turned += self.turns


class Items:
    """A map-style dataset of PyTorch."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows.rows

    def __getitem__(self, index: int) -> Any:
        return tuple(map_structure(lambda leaf: leaf[index], self.rows.data))


def tf_data(rows: Rows, spec: Description) -> Any:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(rows.data)
    if spec.get("shuffled"):
        data = data.shuffle(64, seed=spec["shuffled"])
    if spec.get("unknown"):
        data = data.filter(lambda *row: True)
    data = data.batch(rows.size, drop_remainder=bool(spec.get("drop")))
    data = data.prefetch(2) if spec.get("prefetch") else data
    return data.repeat() if spec.get("endless") else data


def torch_loader(rows: Rows, spec: Description) -> Any:
    import torch

    return torch.utils.data.DataLoader(Items(rows), batch_size=rows.size, drop_last=bool(spec.get("drop")))


def stream(rows: Rows, spec: Description) -> Any:
    """Batches of the kind that `spec` names."""
    kind, endless = spec["kind"], bool(spec.get("endless"))
    if kind == "tf.data":
        return tf_data(rows, spec)
    if kind == "PyDataset":
        return Numbered(rows, endless, bool(spec.get("turns")), workers=spec.get("workers", 1))
    if kind == "generator":
        return rows.forever() if endless else rows.once()
    return torch_loader(rows, spec)


# Callbacks


class Scales(keras.callbacks.Callback):
    """Changes the first weight of the model after a batch or an epoch."""

    def __init__(self, on: str, number: int, factor: float) -> None:
        super().__init__()
        self.on, self.number, self.factor = on, number, factor

    def _change(self, on: str, number: int) -> None:
        if self.on == on and number == self.number:
            first = self.model.trainable_variables[0]
            first.assign(first * self.factor)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._change("batch", batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._change("epoch", epoch)


class SetsRate(keras.callbacks.Callback):
    """Sets the learning rate before a batch."""

    def __init__(self, number: int, rate: float) -> None:
        super().__init__()
        self.number, self.rate = number, rate

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == self.number:
            self.model.optimizer.learning_rate = self.rate


class Stops(keras.callbacks.Callback):
    """Stops the fit after a batch."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch >= self.number:
            self.model.stop_training = True


class Notes(keras.callbacks.Callback):
    """Keeps the logs of all batches, and the sum of the first weight at each."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def _note(self, batch: int, logs: Any) -> None:
        first = self.model.trainable_variables
        kept = {name: float(value) for name, value in (logs or {}).items()}
        self.noted.append({"batch": int(batch), **kept, "first": float(keras.ops.sum(first[0]))})

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note(batch, logs)

    def told(self) -> Any:
        return self.noted


class Looks(keras.callbacks.Callback):
    """Evaluates and predicts at the end of each epoch."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.x, self.y = x, y
        self.seen: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        evaluated = self.model.evaluate(self.x, self.y, batch_size=5, verbose=0, return_dict=True)
        predicted = self.model.predict(self.x, batch_size=5, verbose=0)
        self.seen.append({"evaluated": evaluated, "predicted": predicted})

    def told(self) -> Any:
        return self.seen


OWN_CALLBACKS: dict[str, Any] = {
    "Counts": Counts,
    "Scales": Scales,
    "SetsRate": SetsRate,
    "Stops": Stops,
    "Notes": Notes,
}


# Calls


class Training:
    """The model of a description, and the calls of its methods."""

    def __init__(self, run: Run, description: Description) -> None:
        self.run, self.description = run, description
        self.spec = description["model"]
        self.calls: dict[str, Callable[[Description], Any]] = {
            "fit": self._fit,
            "evaluate": self._evaluate,
            "predict": self._predict,
            "batches": self._batches,
            "compile": self._compile,
            "freeze": self._freeze,
            "set": self._set,
        }
        #: number of the call under way
        self.number = 0
        #: by which inputs and first weights are multiplied
        self.factor = 1.0
        if description.get("nudged"):
            self.factor += 2.0 ** (-9 if description["policy"] in HALF else -22)
        with run.scope():
            self.model = models.make_model(self.spec)
            for weight in self.model.trainable_weights if self.factor > 1 else ():
                weight.assign(weight * self.factor)
            models.compile_model(self.model, description["compile"])

    def call(self, call: Description) -> Any:
        self.number += 1
        return self.calls[call["call"]](call)

    def _arrays(self, data: Description) -> tuple[Any, ...]:
        """(x, y) or (x, y, sample weights) of a data's description."""
        rows, tag = data["rows"], data.get("tag", 0)
        x = models.make_inputs(self.run, self.spec, rows, tag, self.factor)
        found = (x, models.make_labels(self.run, self.spec, rows, tag))
        if data.get("weights"):
            found += (models.make_weights(self.run, self.spec, rows, tag, data["weights"]),)
        return found

    def _data(self, data: Description, *, labels: bool = True) -> dict[str, Any]:
        """The arguments of `fit`, `evaluate` or `predict` that hold data."""
        arrays = self._arrays(data) if labels else self._arrays(data)[:1]
        if data["kind"] not in ("arrays", "tensors"):
            # A list is a tensor to TensorFlow.
            arrays = tuple(tuple(part) if isinstance(part, list) else part for part in arrays)
            return {"x": stream(Rows(arrays, data["batch"]), data)}
        if data["kind"] == "tensors":
            arrays = tuple(map_structure(keras.ops.convert_to_tensor, part) for part in arrays)
        named = dict(zip(("x", "y", "sample_weight"), arrays, strict=False))
        return {**named, **({"batch_size": data["batch"]} if data.get("batch") else {})}

    def _fit(self, call: Description) -> Any:
        options = dict(call.get("options", {}))
        if "class_weight" in options:
            options["class_weight"] = {int(key): value for key, value in options["class_weight"].items()}
        if call.get("validation"):
            given = self._data(call["validation"])
            size = given.pop("batch_size", None)
            options |= {"validation_batch_size": size} if size else {}
            options["validation_data"] = tuple(given.values()) if "y" in given else given["x"]
        callbacks = [self._callback(spec) for spec in call.get("callbacks", [])]
        options = {"shuffle": False, "verbose": 0, **self._data(call["data"]), **options}
        history = self.model.fit(**options, callbacks=[*callbacks, Limit()])
        heard = [callback.told() for callback in callbacks if hasattr(callback, "told")]
        return {"history": history.history, "epochs": history.epoch, "heard": heard}

    def _callback(self, spec: Any) -> Any:
        name, options = spec
        if name == "Looks":
            return Looks(*self._arrays({"rows": 11, "tag": 7}))
        if name in OWN_CALLBACKS:
            return OWN_CALLBACKS[name](**options)
        if name == "LearningRateScheduler":
            return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * options["factor"])
        if name in ("ModelCheckpoint", "CSVLogger"):
            path = str(self.run.folder / f"{self.number}-")
            name_of = {"ModelCheckpoint": "filepath", "CSVLogger": "filename"}[name]
            options = {**options, name_of: path + options[name_of]}
        return getattr(keras.callbacks, name)(**options)

    def _evaluate(self, call: Description) -> Any:
        options = {"verbose": 0, "return_dict": True, **call.get("options", {})}
        return self.model.evaluate(**self._data(call["data"]), **options, callbacks=[Limit()])

    def _predict(self, call: Description) -> Any:
        data = self._data(call["data"], labels=bool(call.get("labels")))
        data = {name: value for name, value in data.items() if name in ("x", "batch_size")}
        return self.model.predict(**data, **{"verbose": 0, **call.get("options", {})}, callbacks=[Limit()])

    def _batches(self, call: Description) -> Any:
        method = getattr(self.model, call["method"])
        rows = Rows(self._arrays(call["data"]), call["data"]["batch"])
        if call["method"] == "predict_on_batch":
            return [method(batch[0]) for batch in rows.once()]
        return [method(*batch, **call.get("options", {})) for batch in rows.once()]

    def _compile(self, call: Description) -> None:
        if call.get("outside"):
            models.compile_model(self.model, call["compile"])
        else:
            with self.run.scope():
                models.compile_model(self.model, call["compile"])

    def _freeze(self, call: Description) -> None:
        """Fixes the layer before the outputs, or frees it; `compile` must follow."""
        layers = [
            layer for layer in self.model._flatten_layers() if layer.weights and layer is not self.model
        ]
        layers[0].trainable = bool(call["trainable"])

    def _set(self, call: Description) -> None:
        """Changes weights or the learning rate between two calls."""
        if call["what"] == "weights":
            # Numbers of half precision, counters and seeds stay.
            changed = [w * call["factor"] if w.dtype == "float32" else w for w in self.model.get_weights()]
            self.model.set_weights(changed)
        else:
            self.model.optimizer.learning_rate = call["factor"]

    def files(self) -> dict[str, Any]:
        """Names of the files that callbacks wrote, and the numbers in tables."""
        found = {}
        for path in sorted(self.run.folder.iterdir()):
            found[path.name] = _read_table(path) if path.suffix == ".csv" else "a file"
        return found


def _read_table(path: Any) -> Any:
    with path.open() as file:
        return [[_as_number(cell) for cell in row] for row in csv.reader(file)]


def _as_number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
