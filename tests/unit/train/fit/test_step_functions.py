"""Step functions of Keras' own and of a trainer, kept apart."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from insitu.base.errors import TrainingError
from insitu.train.fit.keras_patch import dispatch_methods
from insitu.train.fit.trainer import StepFunctions, needed_functions

dispatch_methods()


def own_train(source: Any) -> Any:
    """A trainer's function."""


def keras_train(source: Any) -> Any:
    """Stands for a function that Keras makes."""


def make_model(kind: Any = keras.Sequential) -> Any:
    made = kind([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def functions_of(model: Any, *, are_own: bool) -> StepFunctions:
    return StepFunctions(model, {"train_function": own_train}, are_own=are_own)


def make(model: Any, functions: StepFunctions, attribute: str = "train_function") -> None:
    def in_keras_way() -> None:
        setattr(model, attribute, keras_train)

    functions.make(attribute, in_keras_way)


def test_each_kind_finds_what_it_made_before() -> None:
    model = make_model()
    functions = functions_of(model, are_own=False)
    make(model, functions)
    assert model.train_function is keras_train
    with functions.switch(own=True):
        assert model.train_function is None
        make(model, functions)
        assert model.train_function is own_train
        with functions.switch(own=False):
            assert not functions.are_own
            make(model, functions)
        assert model.train_function is own_train
    assert (model.train_function, functions.are_own) == (keras_train, False)


def test_what_a_trainer_has_no_function_for_is_made_by_keras() -> None:
    model = make_model()
    functions = functions_of(model, are_own=True)
    make(model, functions, "predict_function")
    assert model.predict_function is keras_train
    functions.check_replaceable(["predict_function"])


def test_a_model_that_is_compiled_meanwhile_gets_no_old_function_back() -> None:
    model = make_model()
    functions = functions_of(model, are_own=False)
    make(model, functions)
    with functions.switch(own=True):
        functions.forget()
    assert model.train_function is None


def test_a_failure_leaves_the_functions_of_before() -> None:
    model = make_model()
    functions = functions_of(model, are_own=False)
    make(model, functions)
    with pytest.raises(ZeroDivisionError), functions.switch(own=True):
        raise ZeroDivisionError
    assert (model.train_function, functions.are_own) == (keras_train, False)


class Overriding(keras.Sequential):
    def make_train_function(self, force: bool = False) -> Any:
        return super().make_train_function(force)


def test_functions_of_the_users_own_are_refused() -> None:
    model = make_model(Overriding)
    functions = functions_of(model, are_own=True)
    functions.check_replaceable(["test_function", "predict_function"])
    with pytest.raises(TrainingError, match=r"Overriding\.make_train_function, overridden.*train_step"):
        functions.check_replaceable(["train_function"])

    model = make_model()
    functions = functions_of(model, are_own=True)
    make(model, functions)
    functions.check_replaceable(["train_function"])
    model.train_function = lambda iterator: {}
    with pytest.raises(TrainingError, match=r"Sequential\.train_function, set by hand"):
        functions.check_replaceable(["train_function"])


@pytest.mark.parametrize(
    ("name", "arguments", "needed"),
    [
        ("fit", {}, ["train_function"]),
        ("fit", {"validation_data": (1, 2)}, ["train_function", "test_function"]),
        ("fit", {"validation_split": 0.1}, ["train_function", "test_function"]),
        ("train_on_batch", {}, ["train_function"]),
        ("evaluate", {}, ["test_function"]),
        ("test_on_batch", {}, ["test_function"]),
        ("predict", {}, ["predict_function"]),
        ("predict_on_batch", {}, []),
    ],
)
def test_what_a_call_needs(name: str, arguments: dict[str, Any], needed: list[str]) -> None:
    assert list(needed_functions(name, arguments)) == needed
