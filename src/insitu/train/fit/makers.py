"""Remembers the strategy in whose scope a layer or model was made, as `tf.distribute` does.

A model that was made in a scope belongs to its strategy, also where it is compiled and trained outside.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

from insitu.context import context
from insitu.errors import TrainingError
from insitu.grid import Dataset


class Maker(Protocol):
    """A strategy, as far as this module needs it."""

    @property
    def delegates_to_keras(self) -> bool:
        """Whether Keras' own loop does what the strategy would."""

    def compile_made(self, model: Any, compile_model: Any) -> None:
        """Compile a model that was made in the scope, and take it over."""


_ATTRIBUTE = "_insitu_maker"
"""Of the layer itself, so that a model and its strategy are freed together. A table of all layers would keep
every model for ever, since a strategy knows its models."""


def note_maker(layer: Any, strategy: Maker) -> None:
    """Remember that `layer`, maybe a model, was made in the scope of `strategy`."""
    # Not as Keras and PyTorch set attributes, which they track and save.
    object.__setattr__(layer, _ATTRIBUTE, strategy)


def maker_of(layer: Any) -> Maker | None:
    """Return the strategy in whose scope `layer` was made, else None."""
    maker: Maker | None = vars(layer).get(_ATTRIBUTE)
    return maker


def check_not_of_scope(model: Any) -> None:
    """Raise TrainingError where Keras alone would train layers of a strategy, in each process by itself."""
    for layer in model._flatten_layers():
        maker = maker_of(layer)
        if maker is not None and not maker.delegates_to_keras:
            raise TrainingError(
                "Layers that were made in a strategy's scope are trained by it. Received: the model "
                f"{model.name!r}, made and compiled outside, with the layer {layer.name!r} of a "
                f"{type(maker).__name__}. Make the model in `with strategy.scope():`, too."
            )


def warn_of_separate_fit(model: Any, data: Any) -> None:
    """Warn where a model of no strategy is fitted to the rows of this task's shards, and other tasks have the
    rest. `data` is what `fit` got as `x`. Call it where a method of `keras.Model` was replaced: the warning
    names the line that called that."""
    here = context()
    if isinstance(data, Dataset) and len(here.shards) < here.num_shards:
        warnings.warn(
            f"The model {model.name!r} was compiled outside of a strategy's scope, so each worker trains a "
            f"model of its own, here on {len(here.shards)} of {here.num_shards} shards. Make and compile it "
            "in `with strategy.scope():` to train one model on all rows.",
            stacklevel=3,
        )
