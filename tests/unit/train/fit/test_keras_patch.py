"""Methods of Keras' classes that ask a model's trainer."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from insitu.train.fit import keras_patch
from insitu.train.fit.keras_patch import (
    TRAINER_ATTRIBUTE,
    attach_trainer,
    bind_arguments,
    dispatch_methods,
    keras_method,
    merge_kwargs,
)

X, Y = np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")
dispatch_methods()


class Recording:
    """A trainer that notes what it is asked."""

    does_steps = False

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.asked.append((name, args, kwargs))
        return f"result of {name}"

    def make_function(self, attribute: str, make: Callable[[], Any]) -> Any:
        self.asked.append(attribute)
        return make()

    def compile(self, compile_model: Callable[[], None]) -> None:
        self.asked.append("compile")
        compile_model()

    def build(self, build: Callable[[], None]) -> None:
        self.asked.append("build")
        build()


class Own(keras.Sequential):
    """Overrides with a signature of its own."""

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return "own", super().fit(*args, **kwargs)


def make_model(kind: Any = keras.Sequential) -> Any:
    made = kind([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


@pytest.fixture
def model() -> Any:
    return make_model()


def with_trainer(model: Any) -> Recording:
    trainer = Recording()
    attach_trainer(model, trainer)
    return trainer


def test_a_model_without_a_trainer_is_keras_own(model: Any) -> None:
    assert model.fit(X, Y, verbose=0).epoch == [0]
    assert "fit" not in vars(model)


def test_a_trainer_gets_the_calls_as_they_were_made(model: Any) -> None:
    trainer = with_trainer(model)
    assert model.fit([1, 2], [3, 4], 8, epochs=3) == "result of fit"
    for name in ("evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        assert getattr(model, name)([1]) == f"result of {name}"
    assert trainer.asked[0] == ("fit", ([1, 2], [3, 4], 8), {"epochs": 3})
    assert [name for name, _, _ in trainer.asked[1:]] == [
        *("evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
    ]


def test_a_method_of_the_users_own_runs_around_the_trainer() -> None:
    model = make_model(Own)
    trainer = with_trainer(model)
    assert model.fit(X, epochs=2) == ("own", "result of fit")
    assert trainer.asked == [("fit", (X,), {"epochs": 2})]


def test_methods_keep_their_names_and_signatures(model: Any) -> None:
    with_trainer(model)
    assert [model.fit.__name__, model.predict.__name__] == ["fit", "predict"]
    assert list(inspect.signature(model.fit).parameters)[:3] == ["x", "y", "batch_size"]


def test_the_loop_of_keras_asks_for_its_functions(model: Any) -> None:
    trainer = with_trainer(model)
    keras_method(model, "fit")(X, Y, verbose=0)
    keras_method(model, "evaluate")(X, Y, verbose=0)
    assert [asked for asked in trainer.asked if asked != "build"] == ["train_function", "test_function"]
    assert model.train_function is not None


def test_compiling_again_goes_to_the_trainer(model: Any) -> None:
    trainer = with_trainer(model)
    model.compile("adam", "mae")
    assert trainer.asked == ["compile"]
    assert model.optimizer.name == "adam"


# Of NumPy, about how Keras reads a variable that it saves.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_trainer_is_no_part_of_the_model(tmp_path: Path) -> None:
    model = make_model()
    config, weights = model.get_config(), len(model.weights)
    with_trainer(model)
    assert (model.get_config(), len(model.weights), type(model)) == (config, weights, keras.Sequential)
    model.save(tmp_path / "model.keras")
    copies = [
        keras.models.load_model(tmp_path / "model.keras"),
        pickle.loads(pickle.dumps(model)),
        keras.models.clone_model(model),
    ]
    for copy in copies:
        assert type(copy) is keras.Sequential
        assert not hasattr(copy, TRAINER_ATTRIBUTE)


def test_methods_are_replaced_once() -> None:
    before = keras.Model.fit
    dispatch_methods()
    assert keras.Model.fit is before


def test_arguments_are_bound_as_the_method_has_them(model: Any) -> None:
    arguments = bind_arguments(keras_method(model, "fit"), (X, Y), {"epochs": 3})
    assert (arguments["x"] is X, arguments["epochs"], arguments["shuffle"]) == (True, 3, True)
    assert "self" not in arguments
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        bind_arguments(keras_method(model, "fit"), (X,), {"nonsense": 1})


def test_arguments_beside_the_named_ones_are_merged() -> None:
    assert merge_kwargs({"x": 1, "kwargs": {"_hidden": 2}}) == {"x": 1, "_hidden": 2}
    assert merge_kwargs({"x": 1}) == {"x": 1}


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict", "train_on_batch"])
def test_arguments_have_names_behind_another_librarys_wrapper(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = keras_patch._originals[name]

    def logged(model: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model, *args, **kwargs)

    expected = bind_arguments(keras_method(make_model(), name), (X,), {})
    monkeypatch.setitem(keras_patch._originals, name, logged)
    assert bind_arguments(keras_method(make_model(), name), (X,), {}) == expected
