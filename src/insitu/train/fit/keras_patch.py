"""Lets Keras ask a model's trainer, if it has one, what its `fit` and the like shall do.

Methods of Keras' own classes are replaced, once. So a class of the user's that overrides `fit` runs as
written, and its `super().fit(...)` gets here; type, name and attributes of a model stay what they are, which
copying and saving read. A model without a trainer does what it did.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import keras

from insitu.base.errors import TrainingError
from insitu.train.backends import active_backend
from insitu.train.replica import renew_optimizer

TRAINER_ATTRIBUTE = "_insitu_trainer"
"""The attribute of a model that holds its trainer."""

CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
"""The methods that a trainer takes over."""

STEP_FUNCTIONS = ("train_function", "test_function", "predict_function")
"""The attributes in which Keras keeps what its loops call for a step."""

_originals: dict[str, Callable[..., Any]] = {}
"""Keras' own functions, by name. Written by `dispatch_methods`."""


class ModelTrainer(Protocol):
    """Takes a model's calls, and decides who does their steps."""

    @property
    def does_steps(self) -> bool:
        """Whether Keras' loop calls the trainer for its steps. Then the trainer builds the model, and the
        variables hold the state."""

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the method of that name does."""

    def make_function(self, attribute: str, make: Callable[[], Any]) -> Any:
        """Set the model's attribute to the function that Keras' loop calls. `make` is Keras' own way."""

    def compile(self, compile_model: Callable[[], None]) -> None:
        """Compile the model again."""

    def build(self, build: Callable[[], None]) -> None:
        """Build the model when its loop asks for it. `build` is Keras' own way."""


def attach_trainer(model: Any, trainer: ModelTrainer) -> None:
    """Have `model` ask `trainer` from now on."""
    # Around Keras' tracking: the trainer is no part of the model's state.
    object.__setattr__(model, TRAINER_ATTRIBUTE, trainer)


def keras_method(model: Any, name: str) -> Callable[..., Any]:
    """Return Keras' own method of that name, which asks no trainer, bound to `model`."""
    method: Callable[..., Any] = _originals[name].__get__(model)
    return method


def bind_arguments(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults. Raises TypeError as the call would."""
    bound = _signature_of(method.__func__).bind(method.__self__, *args, **kwargs)  # type: ignore[attr-defined]
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])


@functools.cache
def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    names = [name for name, original in _originals.items() if original is function]
    kinds = {parameter.kind for parameter in list(signature.parameters.values())[1:]}
    if not names or not kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return signature
    # A library that logs calls has wrapped Keras' method as (*args, **kwargs): its base class has the names.
    *_, declared = (vars(base)[names[0]] for base in keras.Model.__mro__ if names[0] in vars(base))
    return inspect.signature(declared)


def merge_kwargs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name with those of **kwargs beside the others."""
    named = {name: value for name, value in arguments.items() if name != "kwargs"}
    return {**named, **arguments.get("kwargs", {})}


def dispatch_methods() -> None:
    """Replace the methods of Keras' classes. Done once."""
    if _originals:
        return
    for name in CALLS:
        _replace(name, functools.partial(_dispatch_call, name))
    for attribute in STEP_FUNCTIONS:
        _replace(f"make_{attribute}", functools.partial(_dispatch_making, attribute))
    _replace("compile", _dispatch_compile)
    _replace("_symbolic_build", _dispatch_build)
    for name, dispatch in active_backend().keras_methods(_trainer_of).items():
        _replace(name, dispatch)


Original = Callable[..., Any]


def _replace(name: str, dispatch: Callable[[Original], Original]) -> None:
    """Replace a method of `keras.Model` in the class that defines it."""
    owner = next(base for base in keras.Model.__mro__ if name in vars(base))
    original = _originals[name] = vars(owner)[name]
    setattr(owner, name, functools.wraps(original)(dispatch(original)))


def _trainer_of(model: Any) -> Any:
    return getattr(model, TRAINER_ATTRIBUTE, None)


def _dispatch_call(name: str, original: Original) -> Original:
    def method(model: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = _trainer_of(model)
        trains = name in ("fit", "train_on_batch")
        has_tables = trains and renew_optimizer(model)
        if trainer is not None:
            return trainer.call(name, args, kwargs)
        if trains:
            check_not_of_scope(model)
        with active_backend().add_up_repeated_rows(model) if has_tables else contextlib.nullcontext():
            return original(model, *args, **kwargs)

    return method


def _dispatch_making(attribute: str, original: Original) -> Original:
    def method(model: Any, *args: Any, **kwargs: Any) -> Any:
        trainer, make = _trainer_of(model), functools.partial(original, model, *args, **kwargs)
        return make() if trainer is None else trainer.make_function(attribute, make)

    return method


def _dispatch_compile(original: Original) -> Original:
    def method(model: Any, *args: Any, **kwargs: Any) -> None:
        trainer, compile_model = _trainer_of(model), functools.partial(original, model, *args, **kwargs)
        if trainer is not None:
            trainer.compile(compile_model)
            return
        maker = maker_of(model)
        if maker is not None:
            maker.compile_made(model, compile_model)
        else:
            compile_model()

    return method


def _dispatch_build(original: Original) -> Original:
    def method(model: Any, *args: Any, **kwargs: Any) -> None:
        trainer, build = _trainer_of(model), functools.partial(original, model, *args, **kwargs)
        if trainer is None:
            build()
        else:
            trainer.build(build)

    return method


# Remembers the strategy in whose scope a layer or model was made, as `tf.distribute` does.
#
# A model that was made in a scope belongs to its strategy, also when it is compiled and trained outside


class Maker(Protocol):
    """A strategy, as far as this module needs it."""

    @property
    def delegates_to_keras(self) -> bool:
        """Whether Keras' own loop does what the strategy would."""

    def compile_made(self, model: Any, compile_model: Any) -> None:
        """Compile a model that was made in the scope, and take it over."""


_ATTRIBUTE = "_insitu_maker"
"""Attribute of the layer itself, so that a model and its strategy are freed together. A table of all layers
would keep every model for ever, since a strategy knows its models."""


def record_maker(layer: Any, strategy: Maker) -> None:
    """Remember that `layer`, maybe a model, was made in the scope of `strategy`."""
    # Not as Keras and PyTorch set attributes, which they track and save.
    object.__setattr__(layer, _ATTRIBUTE, strategy)


def maker_of(layer: Any) -> Maker | None:
    """Return the strategy in whose scope `layer` was made, else None."""
    maker: Maker | None = vars(layer).get(_ATTRIBUTE)
    return maker


def check_not_of_scope(model: Any) -> None:
    """Raise TrainingError if Keras alone would train layers of a strategy, in each process by itself."""
    for layer in model._flatten_layers():
        maker = maker_of(layer)
        if maker is not None and not maker.delegates_to_keras:
            raise TrainingError(
                "Layers that were made in a strategy's scope are trained by it. Received: the model "
                f"{model.name!r}, made and compiled outside, with the layer {layer.name!r} of a "
                f"{type(maker).__name__}. Make the model in `with strategy.scope():`, too."
            )
