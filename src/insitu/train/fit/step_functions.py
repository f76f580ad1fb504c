"""Keeps apart what Keras' loop calls for a step of a model: Keras' own functions, and a trainer's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from insitu.errors import TrainingError
from insitu.train.fit.keras_patch import STEP_FUNCTIONS


def needed_functions(name: str, arguments: dict[str, Any]) -> Sequence[str]:
    """Return the functions of a model that a call would have Keras' loop call."""
    if name.startswith("test") or name == "evaluate":
        return ("test_function",)
    if name == "predict":
        return ("predict_function",)
    if name == "predict_on_batch":
        return ()
    tests = arguments.get("validation_data") is not None or arguments.get("validation_split")
    return ("train_function", "test_function") if tests else ("train_function",)


class StepFunctions:
    """The functions that a model keeps as `train_function`, `test_function` and `predict_function`.

    Keras makes each once after `compile`. A model of one replica may be trained by Keras' own functions in
    one call and by a trainer's in the next, or in the middle of it: each kind finds what it made before.
    """

    def __init__(self, model: Any, own: Mapping[str, Callable[..., Any]], *, are_own: bool) -> None:
        self._model = model
        #: The trainer's functions, by attribute.
        self._own = dict(own)
        #: Whether the trainer's are called; else Keras' own. Written by `switch`.
        self.are_own = are_own
        #: What Keras made last, by attribute. Written by `make`.
        self._made: dict[str, Any] = {}
        #: How often the model was compiled again. Written by `forget`.
        self._compilations = 0

    def make(self, attribute: str, make: Callable[[], Any]) -> Any:
        """Set the model's attribute to the function that is to be called. `make` is Keras' own way."""
        if self.are_own and attribute in self._own:
            setattr(self._model, attribute, self._own[attribute])
            return self._own[attribute]
        result = make()
        self._made[attribute] = getattr(self._model, attribute)
        return result

    def forget(self) -> None:
        """Forget all functions: the model has been compiled again, which took them away."""
        self._compilations += 1
        self._made = {}

    @contextlib.contextmanager
    def switch(self, *, own: bool) -> Iterator[None]:
        """While open, have the trainer's functions called, or Keras' own."""
        if own == self.are_own:
            yield
            return
        kept, compilations = self._take(), self._compilations
        self.are_own = own
        try:
            yield
        finally:
            self.are_own = not own
            self._take()
            if compilations == self._compilations:
                for attribute, function in kept.items():
                    setattr(self._model, attribute, function)

    def _take(self) -> dict[str, Any]:
        taken = {attribute: getattr(self._model, attribute) for attribute in STEP_FUNCTIONS}
        for attribute in STEP_FUNCTIONS:
            setattr(self._model, attribute, None)
        return taken

    def check_replaceable(self, attributes: Iterable[str]) -> None:
        """Raise TrainingError where the user has replaced one of these functions, or what makes it: the
        trainer's would be called instead."""
        for attribute in attributes:
            if received := self._find_replacement(attribute):
                step = attribute.replace("_function", "_step")
                raise TrainingError(
                    f"insitu makes the {attribute} of a model over several replicas, in a job, on an "
                    "insitu.Dataset and with insitu.BackupAndRestore. Received: "
                    f"{received}. Override {step}, use a callback, or train with one replica outside a job."
                )

    def _find_replacement(self, attribute: str) -> str:
        """Return what the user has replaced, or an empty text."""
        model, maker = self._model, f"make_{attribute}"
        kind = type(model).__name__
        if maker in vars(model) or getattr(type(model), maker) is not getattr(keras.Model, maker):
            return f"{kind}.{maker}, overridden"
        function = getattr(model, attribute)
        known = (None, self._own.get(attribute), self._made.get(attribute))
        return "" if any(function is one for one in known) else f"{kind}.{attribute}, set by hand"
