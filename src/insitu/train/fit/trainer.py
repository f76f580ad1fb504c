"""Ties a compiled model to a strategy: Keras' `fit` stays, its train function is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import numpy as np
from keras.src.trainers.data_adapters import array_slicing
from numpy.typing import NDArray

from insitu.errors import TrainingError
from insitu.exchange import Group
from insitu.train.collectives import barrier_token, broadcast_value
from insitu.train.devices import log_variables
from insitu.train.elastic import Again
from insitu.train.fit.adapter import FeedAdapter
from insitu.train.fit.bookkeeping import Bookkeeper
from insitu.train.fit.callbacks import EpochCallbacks, Memory, own_callbacks
from insitu.train.fit.labels import check_labels
from insitu.train.fit.place import Place, as_numbers, forward, spread
from insitu.train.fit.sources import make_feed
from insitu.train.fit.two_phase import Layout, StepExecutor
from insitu.train.replica import (
    Logs,
    ModelState,
    StepBatch,
    build_to_predict,
    build_to_train,
    load_snapshot,
    read_state,
    to_numpy,
    wrap_train_function,
)

T = TypeVar("T")
Build = Callable[[Any, Any], None]

_ATTRIBUTE = "_insitu_binding"
_REPLACED = ("fit", "evaluate", "predict")


def binding_of(model: Any) -> Binding | None:
    """The binding of a model that was compiled in a strategy's scope."""
    return getattr(model, _ATTRIBUTE, None)


class Binding:
    """One model under one strategy.

    `position` is the (epoch, step) of Keras that comes next; `metrics_to_restore` what the metrics held in
    the middle of that epoch, by variable name, empty at its beginning.
    """

    def __init__(self, model: Any, strategy: Layout) -> None:
        self.model = model
        self.strategy = strategy
        self.membership = strategy.membership
        self.session = self.membership.session
        self.number = self.session.register(self)
        self.bookkeeper = Bookkeeper(self.membership)
        self.position = (0, 0)
        self.metrics_to_restore: dict[str, Any] = {}
        self.fit_index = -1
        self.place = Place()
        self.callbacks: EpochCallbacks | None = None
        self._ended = False
        self._entering: dict[str, Any] | None = None
        self._restored: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._steps: dict[Any, StepExecutor] = {}
        self._train_step: StepExecutor | None = None
        self._test_step: StepExecutor | None = None
        self._train_adapter: FeedAdapter | None = None
        self._test_adapter: FeedAdapter | None = None
        self._outputs: list[Any] = []
        # From the class: the model may be compiled for the second time.
        self._keras = {name: getattr(type(model), name).__get__(model) for name in _REPLACED}
        for name in _REPLACED:
            setattr(model, name, forward(self, name, self._keras[name]))
        model.make_train_function = self._maker("train_function", self._train_one)
        model.make_test_function = self._maker("test_function", self._test_one)
        # Around Keras' tracking: the binding is no part of the model's state.
        object.__setattr__(model, _ATTRIBUTE, self)

    @property
    def state(self) -> ModelState:
        return read_state(self.model)

    @property
    def prepared(self) -> bool:
        """Whether the model has been built and has its first weights."""
        return bool(self._steps)

    def prepare(
        self, example: Any, part_rows: int | None = None, build: Build = build_to_train
    ) -> StepExecutor:
        """The step for batches like `example`, of up to `part_rows` rows in each shard, if known."""
        shapes = keras.tree.map_structure(lambda leaf: (leaf.shape[1:], leaf.dtype), example)
        key = (build, str(shapes))
        if key not in self._steps:
            self.strategy.before_build(self.model, example, part_rows)
            with self.strategy.placement():
                build(self.model, example)
            first = not self._steps
            self._steps[key] = self.strategy.make_step(self.model, example, first=first)
            if first:
                log_variables(self.model.variables)
        return self._steps[key]

    def steps(self) -> tuple[StepExecutor, ...]:
        """The steps that were made, one for each structure of batches."""
        return tuple(self._steps.values())

    # Where a fit is

    def go_on_at(self, epoch: int, step: int) -> None:
        """The fit that begins goes on at this place: what comes before was done by another attempt."""
        self.position = (epoch, step)
        self.bookkeeper.take_up(epoch, step)
        self.model._initial_epoch = epoch

    def begin_epoch(self, epoch: int, step: int) -> None:
        """Keras begins `epoch`, and has reset the metrics; its first `step` steps were done before."""
        self.position = (epoch, step)
        self.place.begin(epoch, step)
        if step:
            self._assign(self.metrics_to_restore)
        self.metrics_to_restore = {}

    def end_of_skipped(self) -> None:
        """The last of the steps has been passed over that were done before."""
        if self._entering is not None:
            self.model.stop_training = self._entering["stop"]

    def end_epoch(self, epoch: int) -> None:
        """All callbacks have heard of the end of `epoch`. The chief's writers tell what they remember, so
        that another chief can go on from there."""
        memory = _prepared(self.callbacks).memory
        if self.membership.context.job is None or not memory.has_writers:
            return

        def work(group: Group) -> NDArray[Any]:
            chief = self.membership.chief_rank(group)
            if chief is not None:
                told = broadcast_value(group, chief, memory.read_writers() if chief == group.rank else None)
                memory.writers = told
            return barrier_token(group)

        self.membership.lockstep.insist(self.session.key("epoch", epoch), work)

    def end_fit(self) -> None:
        """All steps of the fit are done. Called before callbacks hear of its end, if they do: what they see
        then is the trained model, and what they make of it stays."""
        if not self._ended:
            self._ended = True
            self.strategy.end_fit(self)

    def restore(self, epoch: int, step: int, values: dict[str, Any], more: dict[str, Any]) -> None:
        """The model has been given the state that a checkpoint holds: the fit goes on at this place."""
        self.position = (epoch, step)
        self.metrics_to_restore = self.metrics()
        self.place.logs = more["logs"]
        self._restored = (values, more["memory"])
        self.bookkeeper.take_up(epoch, step)
        _prepared(self.callbacks).memory.go_on(epoch)

    def remember(self, epoch: int, *, begun: bool) -> None:
        """Gives the callbacks what they remembered: before they hear of the beginning of `epoch` where they
        hadn't when it was saved; after it, together with what they changed, where it goes on in the middle.
        """
        if self._restored is None or self.callbacks is None or begun != (self.position[1] > 0):
            return
        (values, memory), self._restored = self._restored, None
        self.callbacks.memory.write(memory)
        if begun:
            load_snapshot(self.state, values)

    @property
    def whereabouts(self) -> tuple[int, ...]:
        """Where in the data the call under way is: the same in each task before it does the same unit."""
        if self.callbacks is not None:
            return self.position
        # Of a fit that is over, `position` tells only tasks that have trained it themselves.
        return self.place.epoch, self.place.steps, self.place.tests

    @property
    def tests_to_skip(self) -> int:
        return self._entering["tests"] if self._entering is not None else 0

    def give(self) -> dict[str, Any]:
        """What another task needs to go on in the middle of the call under way."""
        place = self.place
        return {
            "epoch": place.epoch,
            "steps": place.steps,
            "tests": place.tests,
            "unchecked": place.unchecked,
            "logs": as_numbers(place.logs),
            "test_logs": as_numbers(place.test_logs),
            "metrics": self.metrics(),
            "trained": place.trained or self.metrics(),
            "outputs": list(self._outputs),
            "stop": bool(getattr(self.model, "stop_training", False)),
            "memory": self.callbacks.memory.read() if self.callbacks is not None else {},
        }

    def arrive(self, told: dict[str, Any]) -> None:
        """This task has come to where the others are, and is now as they were told to be."""
        self._entering = None
        place = self.place
        place.epoch, place.steps, place.tests = told["epoch"], told["steps"], told["tests"]
        place.unchecked = told["unchecked"]
        place.logs, place.test_logs = told["logs"], told["test_logs"]
        place.trained = told["trained"] if place.tests else {}
        self.model.stop_training = told["stop"]
        if self.callbacks is not None:
            self.callbacks.memory.write(told["memory"])
            self.bookkeeper.take_up(place.epoch, place.steps)

    def metrics(self) -> dict[str, Any]:
        """What the metrics' variables hold, by name."""
        state = self.state
        metrics = {id(variable) for variable in (*state.sums, *state.metric_first)}
        return {name: to_numpy(v) for name, v in state.named() if id(v) in metrics}

    def _assign(self, values: dict[str, Any]) -> None:
        variables = dict(self.state.named())
        for name, value in values.items():
            variables[name].assign(value)

    # What takes the place of Keras' methods

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """A call of `fit`, `evaluate` or `predict` by the script, or by a callback in the midst of one."""
        if arguments.get("kwargs", {}).get("_use_cached_eval_dataset"):
            return self._validate(arguments)
        with self.membership.apart(self.session.under_way):
            return self.session.run(self, lambda: getattr(self, f"_{name}")(arguments))

    def _fit(self, arguments: dict[str, Any]) -> Any:
        self.strategy.check_open(self.model)
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
        check_labels(self.model, data[0], "fit")
        adapter = self._train_adapter = FeedAdapter(feed, steps_per_epoch)
        self._train_step = self.prepare(feed.example(), feed.part_rows)
        self.fit_index = membership.count_fit()
        given = keras.tree.flatten(arguments["callbacks"]) if arguments["callbacks"] else []
        if self.session.is_done():
            return self._recall_fit(given)
        self.position, self.metrics_to_restore, self.place = (0, 0), {}, Place()
        self.bookkeeper.begin(adapter)
        self._ended = False
        params = {"epochs": arguments["epochs"], "steps": steps_per_epoch or feed.num_steps}
        self.strategy.begin_fit(self, feed, *params.values())
        if arguments["validation_data"] is not None:
            arguments["validation_data"] = self._validation_adapter(arguments, batch_size)
            arguments["validation_steps"] = None
        verbose = self._verbosity(arguments["verbose"])
        self.callbacks = EpochCallbacks(
            self, adapter, given, membership.context.is_chief, verbose=verbose, **params
        )
        arguments.update(callbacks=self.callbacks, verbose=verbose, shuffle=False)
        self._enter(arguments)
        try:
            history = self._keras["fit"](x=adapter, **arguments)
            self.end_fit()
            self.session.keep_memory(self.callbacks.memory.read())
            return history
        finally:
            self.callbacks = self._restored = None
            self.model._initial_epoch = None
            self.bookkeeper.end()

    def _recall_fit(self, given: list[Any]) -> Any:
        history = self.session.recall(self)
        Memory(given, history, self.membership.context.is_chief).write(self.session.recall_memory())
        return history

    def _enter(self, arguments: dict[str, Any]) -> None:
        """Goes on in the middle of the fit that the others are in, if they are."""
        told = self._entering = self.session.within()
        if told is None:
            return
        self.position = (told["epoch"], told["steps"])
        self.metrics_to_restore = told["trained"]
        self.place.logs = told["logs"]
        arguments["initial_epoch"] = told["epoch"]
        _prepared(self.callbacks).memory.go_on(told["epoch"])

    def _validation_adapter(self, arguments: dict[str, Any], batch_size: int | None) -> FeedAdapter:
        data = arguments["validation_data"]
        parts = data if isinstance(data, tuple) else (data,)
        feed = make_feed(
            *parts,
            batch_size=arguments.pop("validation_batch_size") or (batch_size if len(parts) > 1 else None),
            **self.strategy.evaluation_options(parts[0]),
        )
        self._test_step = self.prepare(feed.example(), feed.part_rows)
        self._test_adapter = FeedAdapter(feed, arguments["validation_steps"])
        return self._test_adapter

    def _validate(self, arguments: dict[str, Any]) -> Any:
        """The evaluation at the end of an epoch of a fit."""
        self.place.trained = self.metrics()
        return self._test(lambda: self._keras["evaluate"](**spread(arguments)))

    def _test(self, evaluate: Callable[[], Any]) -> Any:
        self.place.tests = 0
        _prepared(self._test_adapter).position = (0, self.tests_to_skip)
        result = evaluate()
        self.place.trained = {}
        return result

    def _evaluate(self, arguments: dict[str, Any]) -> Any:
        data = tuple(arguments.pop(name) for name in ("x", "y", "sample_weight"))
        options = self.strategy.evaluation_options(data[0])
        feed = make_feed(*data, batch_size=arguments.pop("batch_size"), **options)
        check_labels(self.model, data[0], "evaluate")
        step = self.prepare(feed.example(), feed.part_rows)
        if self.session.is_done():
            return self.session.recall(self)
        before = self._test_step, self._test_adapter, self.place, self._entering
        self.place, self._entering = Place(), self.session.within()
        arguments["verbose"] = self._verbosity(arguments["verbose"])
        steps = arguments.pop("steps")
        self._test_step, self._test_adapter = step, FeedAdapter(feed, steps)
        try:
            return self._test(
                lambda: self._keras["evaluate"](x=self._test_adapter, steps=steps, **spread(arguments))
            )
        finally:
            self._test_step, self._test_adapter, self.place, self._entering = before

    def _predict(self, arguments: dict[str, Any]) -> Any:
        x = arguments.pop("x")
        options = self.strategy.evaluation_options(x)
        feed = make_feed(x, batch_size=arguments.pop("batch_size"), **options)
        self.prepare(feed.example(), feed.part_rows, build_to_predict)
        if self.session.is_done():
            return self.session.recall(self)
        steps, verbose = arguments["steps"], self._verbosity(arguments["verbose"])
        callbacks = keras.callbacks.CallbackList(
            own_callbacks(arguments["callbacks"], self.membership.context.is_chief),
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=1,
            steps=steps or feed.num_steps,
            model=self.model,
        )
        before, self._outputs = self._outputs, []
        try:
            return self._predict_all(FeedAdapter(feed), steps, callbacks)
        finally:
            self._outputs = before

    def _predict_all(self, adapter: FeedAdapter, steps: int | None, callbacks: Any) -> Any:
        batch = adapter.feed.example()
        step = self.prepare(batch, build=build_to_predict)
        example = step.example_output(batch)
        told = self.session.within()
        if told is not None:
            self._outputs = list(told["outputs"])
            adapter.position = (0, len(self._outputs))
        callbacks.on_predict_begin()
        for index, work in enumerate(adapter):
            if index == steps:
                break
            if work.skipped:
                continue
            callbacks.on_predict_batch_begin(index)
            self.membership.lockstep.key = self.session.key("predict", index)
            outputs = self._persist(work, adapter, index, lambda work: step.predict(work.parts, example))
            self._outputs.append(outputs)
            callbacks.on_predict_batch_end(index, {"outputs": self._outputs[-1]})
        callbacks.on_predict_end()
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *self._outputs)

    def _verbosity(self, verbose: Any) -> Any:
        """One task shows progress: N bars on one terminal show nothing."""
        return self.membership.verbosity(verbose)

    # What takes the place of Keras' compiled functions

    def _maker(self, attribute: str, one: Callable[[StepBatch], Logs]) -> Callable[..., Any]:
        function = wrap_train_function(self.model, lambda source: self._run(source, one))

        def make(force: bool = False) -> Callable[..., Any]:
            setattr(self.model, attribute, function)
            return function

        return make

    def _run(self, source: Any, one: Callable[[StepBatch], Logs]) -> Logs:
        """Up to `steps_per_execution` steps; Keras hands over an iterator or a list of steps."""
        iterator: Iterator[Any] = iter(source)
        logs: Logs | None = None
        for _ in range(self.model.steps_per_execution):
            step = next(iterator, None)
            if step is None:
                break
            if not isinstance(step, StepBatch):
                step = self._slice(step)
            logs = self._passed_over(one) if step.skipped else one(step)
        if logs is None:
            raise StopIteration
        return logs

    def _passed_over(self, one: Callable[[StepBatch], Logs]) -> Logs:
        """What is told of a step that was done before this task came: as much as is known."""
        told = self._entering
        if one == self._train_one:
            return dict(self.place.logs) or self._metric_logs()
        self.place.tests += 1
        if told is None:
            return {}
        self._assign(told["metrics"])
        return dict(told["test_logs"])

    def _metric_logs(self) -> Logs:
        return {name: float(value) for name, value in self.model.get_metrics_result().items()}

    def _slice(self, batch: Any) -> StepBatch:
        """A step out of one global batch, as train_on_batch() and test_on_batch() give it."""
        self.membership.group()  # such loops can't be entered in their middle
        data = tuple(part for part in batch if part is not None)
        feed = make_feed(*data, batch_size=len(keras.tree.flatten(data)[0]), **self.membership.feed_options)
        self._train_step = self._test_step = self.prepare(feed.example())
        self._train_adapter = self._test_adapter = None
        return next(feed.steps(0, 0))

    def _train_one(self, step: StepBatch) -> Logs:
        work = _prepared(self._train_step)
        epoch, index = self.position
        lockstep = self.membership.lockstep
        lockstep.key = self.session.key("train", epoch, index)
        if self.place.unchecked >= self.membership.check_every:
            self.place.unchecked = 0
            lockstep.check_next()
        done: list[StepBatch] = []

        def train(step: StepBatch) -> Logs:
            done.append(step)
            return work.train(step.parts, lambda place: self.bookkeeper.at(epoch, index, place))

        logs: Logs = self._persist(step, self._train_adapter, index, train, epoch)
        self.bookkeeper.enter(done[-1], self.strategy.left_out())
        self.position = (epoch, index + 1)
        self.place.steps, self.place.logs = index + 1, logs
        self.place.unchecked += 1
        return logs

    def _test_one(self, step: StepBatch) -> Logs:
        if self.callbacks is not None:
            self.bookkeeper.at(self.place.epoch, self.place.steps, "evaluation")
        work, index = _prepared(self._test_step), self.place.tests
        self.membership.lockstep.key = self.session.key("test", self.place.epoch, index)
        logs: Logs = self._persist(step, self._test_adapter, index, lambda step: work.test(step.parts))
        self.place.tests, self.place.test_logs = index + 1, logs
        return logs

    def _persist(
        self,
        step: StepBatch,
        adapter: FeedAdapter | None,
        index: int,
        do: Callable[[StepBatch], Any],
        epoch: int = 0,
    ) -> Any:
        """Does a step until it is done, after losses with whatever shards this task then has."""
        while True:
            shards = self.membership.context.shards
            if self.membership.shards_move and step.shards != shards:
                if adapter is None:
                    raise TrainingError("Shards moved in the middle of a loop of single batches.")
                adapter.reseat(shards)
                step = adapter.step_at(epoch, index)
                if adapter is self._train_adapter:
                    self.bookkeeper.take_up(epoch, index)
            try:
                return do(step)
            except Again:
                continue


def _prepared(what: T | None) -> T:
    if what is None:
        raise TrainingError(
            "fit() and evaluate() prepare the step. Received: a compiled function on its own."
        )
    return what
