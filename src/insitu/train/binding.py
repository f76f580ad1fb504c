"""Ties a compiled model to a strategy: Keras' `fit` stays, its train function is replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras
import numpy as np
from keras.src.trainers.data_adapters import array_slicing

from insitu.errors import TrainingError
from insitu.train.adapter import FeedAdapter
from insitu.train.backends import Logs, fit_into_trainer
from insitu.train.bookkeeping import Bookkeeper
from insitu.train.callbacks import EpochCallbacks, own_callbacks
from insitu.train.feed import Feed, Step
from insitu.train.membership import Membership
from insitu.train.placement_log import log_variables
from insitu.train.sources import make_feed
from insitu.train.state import ModelState, read_state
from insitu.train.step import Step as StrategyStep

_ATTRIBUTE = "_insitu_binding"
_REPLACED = ("fit", "evaluate", "predict")


def binding_of(model: Any) -> Binding | None:
    """The binding of a model that was compiled in a strategy's scope."""
    return getattr(model, _ATTRIBUTE, None)


class Layout(Protocol):
    """What a binding needs of its strategy."""

    @property
    def membership(self) -> Membership:
        """Who this process is among the tasks."""

    def placement(self) -> AbstractContextManager[Any]:
        """Where variables are made."""

    def make_step(self, model: Any, example: Any, *, first: bool) -> StrategyStep:
        """The step of `model` for batches like `example`; `first` where the model has none yet."""


class Binding:
    """One model under one strategy.

    `position` is the (epoch, step) of Keras that comes next; `metrics_to_restore` what the metrics held in
    the middle of that epoch, by variable name, empty at its beginning.
    """

    def __init__(self, model: Any, strategy: Layout) -> None:
        self.model = model
        self.strategy = strategy
        self.membership = strategy.membership
        self.bookkeeper = Bookkeeper(self.membership.context)
        self.position = (0, 0)
        self.metrics_to_restore: dict[str, Any] = {}
        self.fit_index = -1
        self._fitting = False
        self._steps: dict[Any, StrategyStep] = {}
        self._train_step: StrategyStep | None = None
        self._test_step: StrategyStep | None = None
        # From the class: the model may be compiled for the second time.
        self._keras = {name: getattr(type(model), name).__get__(model) for name in _REPLACED}
        for name in _REPLACED:
            setattr(model, name, _forward(self, name, self._keras[name]))
        model.make_train_function = self._maker("train_function", self._train_one)
        model.make_test_function = self._maker("test_function", self._test_one)
        # Around Keras' tracking: the binding is no part of the model's state.
        object.__setattr__(model, _ATTRIBUTE, self)

    @property
    def state(self) -> ModelState:
        return read_state(self.model)

    def prepare(self, example: Any) -> StrategyStep:
        """The step for batches like `example`."""
        key = str(keras.tree.map_structure(lambda leaf: (leaf.shape[1:], leaf.dtype), example))
        if key not in self._steps:
            with self.strategy.placement():
                self.model._symbolic_build(data_batch=example)
            first = not self._steps
            self._steps[key] = self.strategy.make_step(self.model, example, first=first)
            if first:
                log_variables(self.model.variables)
        return self._steps[key]

    def begin_epoch(self, epoch: int, step: int) -> None:
        """Keras begins `epoch`, and has reset the metrics; its first `step` steps were done before."""
        self.position = (epoch, step)
        if step:
            variables = dict(self.state.named())
            for name, value in self.metrics_to_restore.items():
                variables[name].assign(value)
        self.metrics_to_restore = {}

    # What takes the place of Keras' methods

    def fit(self, arguments: dict[str, Any]) -> Any:
        membership = self.membership
        split, steps_per_epoch = arguments.pop("validation_split", 0.0), arguments["steps_per_epoch"]
        data = tuple(arguments.pop(name) for name in ("x", "y", "sample_weight"))
        batch_size = arguments.pop("batch_size")
        if split and arguments["validation_data"] is None:
            data, arguments["validation_data"] = array_slicing.train_validation_split(
                data, validation_split=split
            )
        feed = make_feed(
            *data,
            batch_size=batch_size,
            shuffle=bool(arguments.pop("shuffle")),
            class_weight=arguments.pop("class_weight"),
            **membership.feed_options,
        )
        adapter = FeedAdapter(feed, steps_per_epoch)
        self._train_step = self.prepare(feed.example())
        self.fit_index = membership.count_fit()
        self.position, self.metrics_to_restore = (0, 0), {}
        self.bookkeeper.begin(feed)
        if arguments["validation_data"] is not None:
            arguments["validation_data"] = self._validation_adapter(arguments, batch_size)
            arguments["validation_steps"] = None
        verbose = self._verbosity(arguments["verbose"])
        callbacks = EpochCallbacks(
            self,
            adapter,
            own_callbacks(arguments["callbacks"], membership.context.is_chief),
            verbose=verbose,
            epochs=arguments["epochs"],
            steps=steps_per_epoch or feed.num_steps,
        )
        arguments.update(callbacks=callbacks, verbose=verbose, shuffle=False)
        self._fitting = True
        try:
            return self._keras["fit"](x=adapter, **arguments)
        finally:
            self._fitting = False
            self.bookkeeper.end()

    def _validation_adapter(self, arguments: dict[str, Any], batch_size: int | None) -> FeedAdapter:
        data = arguments["validation_data"]
        parts = data if isinstance(data, tuple) else (data,)
        feed = make_feed(
            *parts,
            batch_size=arguments.pop("validation_batch_size") or (batch_size if len(parts) > 1 else None),
            **self.membership.feed_options,
        )
        self._test_step = self.prepare(feed.example())
        return FeedAdapter(feed, arguments["validation_steps"])

    def evaluate(self, arguments: dict[str, Any]) -> Any:
        if arguments.get("kwargs", {}).get("_use_cached_eval_dataset"):
            return self._keras["evaluate"](**_spread(arguments))
        data = tuple(arguments.pop(name) for name in ("x", "y", "sample_weight"))
        feed = make_feed(*data, batch_size=arguments.pop("batch_size"), **self.membership.feed_options)
        self._test_step = self.prepare(feed.example())
        arguments["verbose"] = self._verbosity(arguments["verbose"])
        steps = arguments.pop("steps")
        return self._keras["evaluate"](x=FeedAdapter(feed, steps), steps=steps, **_spread(arguments))

    def predict(self, arguments: dict[str, Any]) -> Any:
        feed = make_feed(
            arguments.pop("x"), batch_size=arguments.pop("batch_size"), **self.membership.feed_options
        )
        steps, verbose = arguments["steps"], self._verbosity(arguments["verbose"])
        callbacks = keras.callbacks.CallbackList(
            own_callbacks(arguments["callbacks"], self.membership.context.is_chief),
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=1,
            steps=steps or feed.num_steps,
            model=self.model,
        )
        return self._predict(feed, steps, callbacks)

    def _predict(self, feed: Feed, steps: int | None, callbacks: Any) -> Any:
        batch = feed.example()
        step = self.prepare(batch)
        example = step.example_output(batch)
        outputs = []
        callbacks.on_predict_begin()
        for index, work in enumerate(FeedAdapter(feed)):
            if steps is not None and index >= steps:
                break
            callbacks.on_predict_batch_begin(index)
            outputs.append(step.predict(work.parts, example))
            callbacks.on_predict_batch_end(index, {"outputs": outputs[-1]})
        callbacks.on_predict_end()
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *outputs)

    def _verbosity(self, verbose: Any) -> Any:
        """One task shows progress: N bars on one terminal show nothing."""
        return self.membership.verbosity(verbose)

    # What takes the place of Keras' compiled functions

    def _maker(self, attribute: str, one: Callable[[Step], Logs]) -> Callable[..., Any]:
        function = fit_into_trainer(self.model, lambda source: self._run(source, one))

        def make(force: bool = False) -> Callable[..., Any]:
            setattr(self.model, attribute, function)
            return function

        return make

    def _run(self, source: Any, one: Callable[[Step], Logs]) -> Logs:
        """Up to `steps_per_execution` steps; Keras hands over an iterator or a list of steps."""
        iterator: Iterator[Any] = iter(source)
        logs: Logs | None = None
        for _ in range(self.model.steps_per_execution):
            step = next(iterator, None)
            if step is None:
                break
            if not isinstance(step, Step):
                step = self._slice(step)
            logs = {} if step.skipped else one(step)
        if logs is None:
            raise StopIteration
        return logs

    def _slice(self, batch: Any) -> Step:
        """A step out of one global batch, as train_on_batch() and test_on_batch() give it."""
        data = tuple(part for part in batch if part is not None)
        feed = make_feed(*data, batch_size=len(keras.tree.flatten(data)[0]), **self.membership.feed_options)
        self._train_step = self._test_step = self.prepare(feed.example())
        return next(feed.steps(0, 0))

    def _train_one(self, step: Step) -> Logs:
        work = _prepared(self._train_step)
        epoch, index = self.position
        logs = work.train(step.parts, lambda place: self.bookkeeper.at(epoch, index, place))
        self.bookkeeper.enter(step)
        self.position = (epoch, index + 1)
        return logs

    def _test_one(self, step: Step) -> Logs:
        if self._fitting:
            self.bookkeeper.at(*self.position, "evaluation")
        return _prepared(self._test_step).test(step.parts)


def _prepared(step: StrategyStep | None) -> StrategyStep:
    if step is None:
        raise TrainingError(
            "fit() and evaluate() prepare the step. Received: a compiled function on its own."
        )
    return step


def _forward(binding: Binding, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' method with its own signature, its arguments bound by name and handed to the binding."""
    signature = inspect.signature(original)

    def method(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return getattr(binding, name)(dict(bound.arguments))

    method.__name__, method.__doc__ = name, original.__doc__
    return method


def _spread(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, those of **kwargs beside the others."""
    named = {name: value for name, value in arguments.items() if name != "kwargs"}
    return {**named, **arguments.get("kwargs", {})}
