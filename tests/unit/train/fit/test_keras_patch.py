"""Methods of a Keras model that go to a trainer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import pytest

from insitu.train.fit.keras_patch import TRAINER_ATTRIBUTE, merge_kwargs, patch_model

X, Y = np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")


class Recording:
    """A trainer that notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def fit(self, arguments: dict[str, Any]) -> Any:
        self.calls.append(("fit", arguments))
        return "history"

    def evaluate(self, arguments: dict[str, Any]) -> Any:
        self.calls.append(("evaluate", arguments))
        return {"loss": 0.5}

    def predict(self, arguments: dict[str, Any]) -> Any:
        self.calls.append(("predict", arguments))

    def train_on(self, source: Iterable[Any]) -> Any:
        return self._run("train_on", source)

    def test_on(self, source: Iterable[Any]) -> Any:
        return self._run("test_on", source)

    def _run(self, name: str, source: Iterable[Any]) -> Any:
        next(iter(source))
        self.calls.append((name, None))
        return {"loss": 0.5}

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def model() -> Any:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def test_calls_arrive_with_their_arguments_by_name(model: Any) -> None:
    trainer = Recording()
    patch_model(model, trainer)
    assert model.fit([1, 2], [3, 4], 8, epochs=3) == "history"
    name, arguments = trainer.calls[0]
    assert (name, arguments["x"], arguments["y"]) == ("fit", [1, 2], [3, 4])
    assert (arguments["batch_size"], arguments["epochs"], arguments["shuffle"]) == (8, 3, True)
    model.evaluate([1], verbose=0)
    model.predict([1])
    assert trainer.names == ["fit", "evaluate", "predict"]


def test_methods_keep_their_names_and_refuse_unknown_arguments(model: Any) -> None:
    trainer = Recording()
    patch_model(model, trainer)
    assert [model.fit.__name__, model.predict.__name__] == ["fit", "predict"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        model.fit(X, nonsense=1)
    assert trainer.calls == []


def test_the_loop_of_keras_calls_the_trainer_for_its_steps(model: Any) -> None:
    trainer = Recording()
    keras_methods = patch_model(model, trainer)
    keras_methods.fit(X, Y, batch_size=2, epochs=1, shuffle=False, verbose=0, validation_data=(X, Y))
    assert trainer.names == ["train_on", "train_on", "evaluate"]
    keras_methods.evaluate(X, Y, batch_size=4, verbose=0)
    assert trainer.names[-1] == "test_on"


def test_a_model_that_is_patched_again_has_one_trainer(model: Any) -> None:
    first, second = Recording(), Recording()
    patch_model(model, first)
    keras_methods = patch_model(model, second)
    model.fit(X, Y)
    keras_methods.evaluate(X, Y, batch_size=4, verbose=0)
    assert (first.names, second.names) == ([], ["fit", "test_on"])
    assert getattr(model, TRAINER_ATTRIBUTE) is second


def test_the_trainer_is_no_part_of_the_model(model: Any) -> None:
    config, weights = model.get_config(), len(model.weights)
    patch_model(model, Recording())
    assert (model.get_config(), len(model.weights)) == (config, weights)


def test_arguments_beside_the_named_ones_are_merged() -> None:
    assert merge_kwargs({"x": 1, "kwargs": {"_hidden": 2}}) == {"x": 1, "_hidden": 2}
    assert merge_kwargs({"x": 1}) == {"x": 1}
