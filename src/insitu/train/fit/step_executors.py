"""Makes and keeps the step executors of one compiled model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras

from insitu.base.errors import TrainingError
from insitu.base.measure.time_account import ACCOUNT, COMPILE
from insitu.train.backends import active_backend
from insitu.train.devices import log_variables
from insitu.train.fit.fit_strategy import FitStrategy, StepExecutor
from insitu.train.replica import SAMPLE_ROWS, build_to_train

Build = Callable[[Any, Any], None]
T = TypeVar("T")


class StepExecutors:
    """The executors of a model, one for each structure of batches, from one `compile` to the next."""

    def __init__(self, model: Any, strategy: FitStrategy) -> None:
        self._model = model
        self._strategy = strategy
        #: Those that were made, by the way of building and the structure. Written by `prepare`.
        self._made: dict[Any, StepExecutor] = {}
        #: The optimizer and the trainable variables with which they were made. Written by `prepare`.
        self._made_with: tuple[Any, ...] = ()
        #: The same of the first executor since the model was compiled, or got another optimizer. Written by
        #: `prepare`.
        self._first_made_with: tuple[Any, ...] = ()
        #: Whether the places of the variables were logged. Written by `log_variables`.
        self._has_logged = False
        #: Whether `prepare` builds the model in place of Keras' loop. Written by `building` and `prepare`.
        self.builds = False
        #: Whether any were made, also those that were forgotten since. Written by `prepare`.
        self.were_made = False

    @property
    def made(self) -> tuple[StepExecutor, ...]:
        """Those that were made."""
        return tuple(self._made.values())

    def prepare(self, example: Any, part_rows: int | None, build: Build = build_to_train) -> StepExecutor:
        """Return the executor for batches like `example`, of up to `part_rows` rows in each shard, if known.
        Builds the model if it isn't built."""
        self._forget_stale()
        shapes = keras.tree.map_structure(
            lambda leaf: leaf if leaf is None else (leaf.shape[1:], leaf.dtype), example
        )
        key = (build, str(shapes))
        if key not in self._made:
            check_batch_shape(self._model, self._strategy.membership.num_shards)
            self._strategy.before_build(self._model, example, part_rows)
            with self._strategy.membership.reporter.sampler.hold(COMPILE):
                with self.building(by_prepare=False), self._strategy.placement():
                    build(self._model, example)
                first = not self._made
                self._made[key] = self._strategy.make_step(self._model, example, first=first)
            ACCOUNT.expect_compile()
            self.were_made = True
            self._made_with = self._trained_by()
            if not _are_same(self._made_with[:1], self._first_made_with[:1]):
                self._first_made_with = self._made_with
            self.log_variables()
        return self._made[key]

    @contextlib.contextmanager
    def building(self, *, by_prepare: bool) -> Iterator[None]:
        """While open, leave it to `prepare` to build the model, or to Keras."""
        outer, self.builds = self.builds, by_prepare
        try:
            yield
        finally:
            self.builds = outer

    def log_variables(self) -> None:
        """Log the devices of the model's variables, once, if that is asked for."""
        if not self._has_logged:
            self._has_logged = True
            log_variables(self._model.variables)

    def check_trained(self) -> None:
        """Raise TrainingError if other variables are trainable than the optimizer was built for, and the
        backend can't train them. Keras raises ValueError in its step."""
        optimizer, *trainable = self._trained_by()
        if not active_backend().trains_as_compiled or optimizer is not self._first_made_with[0]:
            return
        built_for = self._first_made_with[1:]
        if not _are_same(trainable, built_for):
            raise TrainingError(
                "On JAX a model trains the variables that were trainable when it was compiled. Received: "
                f"{len(built_for)} variables then, and {len(trainable)} now. Call compile() again after a "
                "change of `trainable`."
            )

    def forget(self) -> None:
        """Forget all executors: the model has been compiled again."""
        self._made = {}
        self._first_made_with = ()

    def _forget_stale(self) -> None:
        """Forget the executors if the model has another optimizer or trains other variables than when they
        were made. Where Keras keeps the function that it made once, so do they."""
        goes_on = active_backend().keeps_step_functions or _are_same(self._trained_by(), self._made_with)
        if self._made and not goes_on:
            self._strategy.check_recompile(self._model)
            self._made = {}

    def _trained_by(self) -> tuple[Any, ...]:
        return self._model.optimizer, *self._model.trainable_variables


def _are_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Return whether both hold the same objects."""
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def require_prepared(what: T | None) -> T:
    """Return what Keras' loop steps by. Raises TrainingError if nothing was prepared."""
    if what is None:
        raise TrainingError(
            "fit() and evaluate() prepare the step. Received: a train or test function that was called on "
            "its own. Call fit() or evaluate()."
        )
    return what


# Refuses models that several replicas can't train: each computes on a part of the global batch


def find_fixed_batch_size(model: Any) -> int | None:
    """Return the number of rows that the inputs of `model` are declared for, if they are."""
    for tensor in getattr(model, "inputs", None) or ():
        shape = getattr(tensor, "shape", None)
        if shape and shape[0] is not None:
            return int(shape[0])
    return None


def check_batch_shape(model: Any, num_replicas: int) -> None:
    """Raise TrainingError if `model` keeps a state for each row of a batch, and there are several
    replicas.

    The size of the batch itself is no reason: Keras holds nobody to it, and sets it in a Sequential model
    that it builds from a first batch.
    """
    if num_replicas == 1:
        return
    stateful = [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    if stateful:
        raise TrainingError(
            "Each replica computes on a part of the global batch. So a model may keep no state of rows from "
            f"one batch to the next. Received: {model.name!r} with the stateful layer {stateful[0]!r} and "
            f"{num_replicas} replicas. Leave stateful=True and the size of the batch (batch_shape, "
            "batch_size) out, or train on one device."
        )


def choose_example_rows(model: Any) -> int:
    """Return how many rows of the first batch show what `model` trains on: those that it is fixed to, or else
    enough to choose some of them for a probe."""
    return find_fixed_batch_size(model) or SAMPLE_ROWS
