"""Trains a compiled model under a strategy.

Read from `KerasTrainer.call` downward. A call that needs nothing of insitu is left to Keras. In the others
Keras' loop stays, and its train function is replaced: it calls `train_on`, which does the steps.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import keras
import numpy as np

from insitu.base.errors import TrainingError
from insitu.exchange import Group
from insitu.grid import Dataset
from insitu.train.backends import active_backend
from insitu.train.elastic import (
    PREDICT,
    TEST,
    TRAIN,
    CallCounter,
    Kind,
    LoopPosition,
    Resumable,
    RetryStep,
)
from insitu.train.fit.adapter import FeedAdapter
from insitu.train.fit.arrays import count_array_rows
from insitu.train.fit.bookkeeping import Bookkeeper
from insitu.train.fit.call_callbacks import make_callbacks
from insitu.train.fit.callback_list import ResumableCallbacks, flatten_callbacks
from insitu.train.fit.callback_memory import CallbackMemory
from insitu.train.fit.callbacks import EpochCallbacks, add_tracker, check_callbacks
from insitu.train.fit.feed import Feed
from insitu.train.fit.fit_strategy import FitStrategy, StepExecutor
from insitu.train.fit.gap import find_drawn, load_random_states, read_random_states
from insitu.train.fit.keras_patch import (
    STEP_FUNCTIONS,
    TRAINER_ATTRIBUTE,
    attach_trainer,
    bind_arguments,
    keras_method,
    merge_kwargs,
)
from insitu.train.fit.loop_state import LoopState
from insitu.train.fit.meetings import FitMeetings
from insitu.train.fit.sources import check_labels, make_feed, make_train_feed
from insitu.train.fit.step_executors import StepExecutors, choose_example_rows, require_prepared
from insitu.train.replica import (
    SKIPPED,
    Logs,
    ModelState,
    ShardBatch,
    StepBatch,
    build_to_predict,
    is_unbuilt,
    read_state,
)

T = TypeVar("T")

_CACHED_TESTS = "_use_cached_eval_dataset"
"""The argument of `evaluate` by which Keras' `fit` tests at the end of an epoch."""

_KINDS: dict[str, Kind] = {"fit": TRAIN, "evaluate": TEST, "predict": PREDICT}
"""Kinds of the units of a call, by the method."""


def trainer_of(model: Any) -> KerasTrainer | None:
    """Return the trainer of a model that was compiled in a strategy's scope, else None."""
    return getattr(model, TRAINER_ATTRIBUTE, None)


class KerasTrainer:
    """Trains, evaluates and predicts with one model under one strategy."""

    def __init__(self, model: Any, strategy: FitStrategy) -> None:
        self.model = model
        self.strategy = strategy
        self.membership = strategy.membership
        self.calls = self.membership.calls
        #: The model's number among those that the script compiles.
        self.number = self.calls.register(self)
        self.bookkeeper = Bookkeeper(self.membership)
        #: Number of the model's last fit among all fits of the process. Written by `_fit`.
        self.fit_index = -1
        #: Position of the call under way; that of the last fit in between. Written by `run_call`.
        self.loop = LoopState(model, self.bookkeeper, self.calls.position(TRAIN), strategy)
        #: Keras' list of callbacks of the fit under way; else None. Written by `_fit`.
        self.callbacks: EpochCallbacks | None = None
        self._executors = StepExecutors(model, strategy)
        #: Means and data of Keras' loop under way. Written as a call begins.
        self._train_executor: StepExecutor | None = None
        self._test_executor: StepExecutor | None = None
        self._train_adapter: FeedAdapter | None = None
        self._test_adapter: FeedAdapter | None = None
        #: The functions that Keras' loop calls for a step. Between calls, those that single batches need.
        own = {"train_function": self.train_on, "test_function": self.test_on}
        self._functions = StepFunctions(
            model,
            {attribute: active_backend().wrap_train_function(run) for attribute, run in own.items()},
            are_own=not strategy.delegates_to_keras,
        )
        attach_trainer(model, self)
        strategy.configure_compiled(model)

    @property
    def executors(self) -> tuple[StepExecutor, ...]:
        """Those that were made, one for each structure of batches."""
        return self._executors.made

    # Calls. See ModelTrainer

    @property
    def does_steps(self) -> bool:
        """Whether Keras' loop calls this trainer for its steps."""
        return self._functions.are_own

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the model's method of that name does: `fit`, `evaluate`, `predict`, or a single batch."""
        method = keras_method(self.model, name)
        arguments = bind_arguments(method, args, kwargs)
        if kwargs.get(_CACHED_TESTS):
            return self._test_epoch(arguments) if self.does_steps else method(*args, **kwargs)
        if self.strategy.delegates_to_keras and not needs_insitu(arguments):
            return self._delegate(name, method, args, kwargs)
        self._functions.check_replaceable(needed_functions(name, arguments))
        building = self._executors.building(by_prepare=True)
        with self._functions.switch(own=True), building, self.strategy.call_scope():
            if name in _KINDS:
                return self.run_call(name, partial(getattr(self, f"_{name}"), arguments))
            if name == "train_on_batch" and self.executors:
                self._executors.check_trained()
            return method(*args, **kwargs)

    def _delegate(
        self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Leave a call to Keras, on the strategy's device."""
        active_backend().check_delegated()
        if name == "fit":
            self.strategy.check_open(self.model)
            self.fit_index = self.membership.count_fit()
        summing = active_backend().add_up_repeated_rows(self.model)
        with self._functions.switch(own=False), self.strategy.placement(), summing:
            result = method(*args, **kwargs)
        self._executors.log_variables()
        return result

    def make_function(self, attribute: str, make: Callable[[], Any]) -> Any:
        """Set the model's attribute to the function that Keras' loop calls."""
        return self._functions.make(attribute, make)

    def compile(self, compile_model: Callable[[], None]) -> None:
        """Compile the model again, in a scope or outside: all steps are made again."""
        self.strategy.check_recompile(self.model)
        with self.strategy.placement():
            compile_model()
        self._functions.forget()
        self._executors.forget()
        self.strategy.configure_compiled(self.model)

    def build(self, build: Callable[[], None]) -> None:
        """Build the model when Keras' loop or a script asks for it, unless `prepare` does."""
        if not self._executors.builds or not self.does_steps:
            build()

    # Training

    def _fit(self, arguments: dict[str, Any]) -> Any:
        self.strategy.check_open(self.model)
        membership, loop = self.membership, self.loop
        batch_size, steps_per_epoch = arguments["batch_size"], arguments["steps_per_epoch"]
        feed = make_train_feed(self.model, arguments, membership.feed_options)
        adapter = FeedAdapter(
            feed,
            steps_per_epoch,
            lambda: (loop.position.epoch, loop.position.step),
            initial_epoch=arguments["initial_epoch"],
            steps_per_execution=self.model.steps_per_execution,
        )
        self._train_adapter = loop.data = adapter
        self._train_executor = self._prepare_for(feed)
        self._executors.check_trained()
        self.fit_index = membership.count_fit()
        given = self.strategy.adapt_callbacks(add_tracker(flatten_callbacks(arguments["callbacks"])))
        check_callbacks(given)
        point = membership.lockstep.find_resume_point()
        if self.calls.is_finished(point):
            return self._recall(given)
        self.bookkeeper.begin(adapter, loop.count_updates)
        epochs, steps = arguments["epochs"], steps_per_epoch or feed.num_steps
        start = self.strategy.begin_fit(self.model, self.fit_index, epochs, adapter.epoch_lengths)
        meetings = FitMeetings(membership, self.model, loop, self.fit_index, self.end_fit)
        meetings.start_at(*start, adapter.epoch_lengths)
        if arguments["validation_data"] is not None:
            arguments["validation_data"] = self._make_validation_adapter(arguments, batch_size)
        verbose, is_chief = membership.verbosity(arguments["verbose"]), membership.context.is_chief
        params = {"epochs": epochs, "steps": steps, "verbose": verbose}
        staged = self.calls.staged_call(point)
        if staged is not None:
            loop.stage(*staged, is_fit=True)
        callbacks = EpochCallbacks(self.model, loop, meetings, given, is_chief, **params)
        outer, self.callbacks = self.callbacks, callbacks
        arguments.update(callbacks=callbacks, verbose=verbose, shuffle=False)
        try:
            with keeping_call(self.calls, self.loop, callbacks):
                history = keras_method(self.model, "fit")(x=adapter, **arguments)
                self.end_fit()
            return history
        finally:
            self.callbacks = outer
            callbacks.restore_initial_epoch()
            self.bookkeeper.end()

    def _make_validation_adapter(self, arguments: dict[str, Any], batch_size: int | None) -> FeedAdapter:
        data = arguments["validation_data"]
        parts = data if isinstance(data, tuple) else (data,)
        feed = make_feed(
            *parts,
            batch_size=arguments.pop("validation_batch_size") or (batch_size if len(parts) > 1 else None),
            steps=arguments["validation_steps"],
            **self.strategy.evaluation_options(parts[0]),
        )
        self._test_executor = self._prepare_for(feed)
        self._test_adapter = self.loop.validation = self._make_test_adapter(feed)
        return self._test_adapter

    def train_on(self, source: Iterable[Any]) -> Logs:
        """Do up to `steps_per_execution` steps: what Keras calls in place of its train function."""
        logs: Logs | None = None
        for batch in self._next_batches(source):
            logs = self.loop.skip_step() if batch.skipped else self._train(batch)
        if logs is None:
            raise StopIteration
        return logs

    def _train(self, batch: StepBatch) -> Logs:
        """Do one training step, again after each loss of another task, until it is done."""
        loop, executor = self.loop, require_prepared(self._train_executor)
        position = loop.position
        if position.kind != TRAIN:  # single batches may follow tests
            position = position.at_step(position.epoch, position.step)
        if loop.steps_since_check >= self.membership.check_every:
            loop.steps_since_check = 0
            self.membership.lockstep.check_before_next_unit()
        place = self._train_adapter, position.epoch, position.step
        batch, logs = self._do(batch, place, lambda parts: executor.train(position, parts, self._report))
        self.bookkeeper.record(batch, self.strategy.left_out(), logs)
        loop.position = position.next_step()
        loop.logs = logs
        loop.steps_since_check += 1
        return logs

    def _report(self, place: str) -> None:
        self.bookkeeper.reporter.report(self.loop.position, place)

    def end_fit(self) -> None:
        """Have the strategy end the fit, once all steps are done. Called before callbacks receive its end, if
        they do: they see the trained model then, and their changes of it stay."""
        if not self.loop.fit_has_ended:
            self.loop.fit_has_ended = True
            self.strategy.end_fit(self.fit_index, self.executors, self.loop.position)

    # Evaluation

    def _test_epoch(self, arguments: dict[str, Any]) -> Any:
        """Do what `model.evaluate` does at the end of an epoch of Keras' `fit`."""
        self.loop.metrics_before_tests = self.loop.metrics()
        return self._run_tests(**merge_kwargs(arguments))

    def _evaluate(self, arguments: dict[str, Any]) -> Any:
        data = tuple(arguments.pop(name) for name in ("x", "y", "sample_weight"))
        options = self.strategy.evaluation_options(data[0])
        feed = make_feed(*data, batch_size=arguments.pop("batch_size"), steps=arguments["steps"], **options)
        check_labels(self.model, data[0], "evaluate")
        executor = self._prepare_for(feed)
        given, steps = flatten_callbacks(arguments["callbacks"]), arguments.pop("steps")
        if not self._enter_call():
            return self._recall(given)
        params = arguments["verbose"], steps or feed.num_steps
        callbacks = make_callbacks(self.membership, self.model, self.loop, given, *params)
        arguments.update(callbacks=callbacks, verbose=callbacks.params["verbose"])
        outer = self._test_executor, self._test_adapter
        self._test_executor, self._test_adapter = executor, self._make_test_adapter(feed)
        try:
            with keeping_call(self.calls, self.loop, callbacks):
                return self._run_tests(x=self._test_adapter, steps=steps, **merge_kwargs(arguments))
        finally:
            self._test_executor, self._test_adapter = outer

    def _make_test_adapter(self, feed: Feed) -> FeedAdapter:
        # Tests are the same in each epoch: they begin with the first batch. Keras stops them after as many
        # steps as were asked for, or with a warning if the data end.
        loop = self.loop
        return FeedAdapter(feed, start=lambda: (0, loop.position.test))

    def _run_tests(self, **arguments: Any) -> Any:
        with self.loop.testing():
            return keras_method(self.model, "evaluate")(**arguments)

    def test_on(self, source: Iterable[Any]) -> Logs:
        """Do up to `steps_per_execution` test steps: what Keras calls in place of its test function."""
        logs: Logs | None = None
        for batch in self._next_batches(source):
            logs = self.loop.skip_test() if batch.skipped else self._test(batch)
        if logs is None:
            raise StopIteration
        return logs

    def _test(self, batch: StepBatch) -> Logs:
        """Do one test step, again after each loss of another task, until it is done."""
        loop, executor = self.loop, require_prepared(self._test_executor)
        position = loop.position
        if position.kind != TEST:
            position = position.at_test(position.test)
        if self.callbacks is not None:
            self._report("evaluation")
        place = self._test_adapter, 0, position.test
        _, logs = self._do(batch, place, lambda parts: executor.test(position, parts))
        loop.position = position.at_test(position.test + 1)
        loop.test_logs = logs
        return logs

    # Prediction

    def _predict(self, arguments: dict[str, Any]) -> Any:
        x, steps = arguments.pop("x"), arguments["steps"]
        given = flatten_callbacks(arguments["callbacks"])
        entered = self.enter_prediction(x, batch_size=arguments.pop("batch_size"), steps=steps)
        if entered is None:
            return self._recall(given)
        feed, example, executor = entered
        params = arguments["verbose"], steps or feed.num_steps
        callbacks = make_callbacks(self.membership, self.model, self.loop, given, *params)
        output, adapter = executor.example_output(example), FeedAdapter(feed)

        def read(start: int) -> Iterator[StepBatch]:
            return iter(()) if self.loop.entry.is_at_end else adapter.steps(0, start)

        def predict(index: int, batch: StepBatch) -> Any:
            self.loop.position = position = self.loop.position.at_prediction(index)
            place = adapter, 0, position.step
            return self._do(batch, place, lambda parts: executor.predict(position, parts, output))[1]

        with keeping_call(self.calls, self.loop, callbacks), self.bookkeeper.evaluating():
            return PredictionLoop(self.model, callbacks, steps).run(read, self.loop.outputs, predict)

    def enter_prediction(self, x: Any, **options: Any) -> tuple[Feed, Any, StepExecutor] | None:
        """Prepare to predict `x`, where the others are. Returns its feed, an example and what predicts, or
        None if the others have finished the call. The options are those of `make_feed`."""
        feed = make_feed(x, **options, **self.strategy.evaluation_options(x))
        example = feed.example()
        executor = self._executors.prepare(example, feed.part_rows, build_to_predict)
        return (feed, example, executor) if self._enter_call() else None

    # Shared by the calls

    def run_call(self, name: str, do: Callable[[], Any]) -> Any:
        """Make a call of the script, or of a callback in the middle of another."""
        kind, outer, nested = _KINDS.get(name, PREDICT), self.loop, self.calls.is_under_way

        def begin() -> Any:
            self.loop = LoopState(self.model, self.bookkeeper, self.calls.position(kind), self.strategy)
            self.membership.check_call(name)
            return do()

        try:
            return self.membership.run_call(self, begin)
        finally:
            # Single batches that are trained after a fit continue counting from its end.
            if nested or kind != TRAIN:
                self.loop = outer

    def _enter_call(self) -> bool:
        """Enter an `evaluate` or a `predict` where the others are, if this task takes another's place. Return
        False if they have finished it."""
        point = self.membership.lockstep.find_resume_point()
        if self.calls.is_finished(point):
            return False
        staged = self.calls.staged_call(point)
        if staged is not None:
            self.loop.stage(*staged)
        return True

    def _recall(self, given: list[Any]) -> Any:
        return recall_call(self.calls, self, given, self.membership.context.is_chief)

    def _prepare_for(self, feed: Feed) -> StepExecutor:
        """Return the executor for the batches of a feed. Builds the model if it isn't built."""
        example = feed.example(choose_example_rows(self.model))
        if active_backend().builds_by_data and is_unbuilt(self.model):
            feed.source.drop_peeked()
        return self._executors.prepare(example, feed.part_rows)

    def _next_batches(self, source: Iterable[Any]) -> Iterator[StepBatch]:
        """Return the batches of one execution; Keras hands over an iterator or a list of steps."""
        return map(self._as_step, islice(iter(source), self.model.steps_per_execution))

    def _as_step(self, batch: Any) -> StepBatch:
        """Return a step; out of one global batch if `train_on_batch` or `test_on_batch` give that."""
        if isinstance(batch, StepBatch):
            return batch
        self.membership.group()  # no replacement can enter a loop of single batches
        data = tuple(batch)
        while data and data[-1] is None:
            data = data[:-1]
        feed = make_feed(*data, batch_size=count_array_rows(data), **self.membership.feed_options)
        self._train_executor = self._test_executor = self._prepare_for(feed)
        self._train_adapter = self._test_adapter = None
        return next(feed.steps(0, 0))

    def _do(
        self,
        batch: StepBatch,
        place: tuple[FeedAdapter | None, int, int],
        run: Callable[[Sequence[ShardBatch]], T],
    ) -> tuple[StepBatch, T]:
        """Do a step of the rows of `batch`, again after each loss, until it is done. `place` says where they
        are read again for other shards. Return the rows that it was done with, and its result."""
        while True:
            if self.membership.shards_move and batch.shards != self.membership.context.shards:
                batch = self._read_again(*place)
            try:
                return batch, run(batch.parts)
            except RetryStep:
                continue

    def _read_again(self, adapter: FeedAdapter | None, epoch: int, step: int) -> StepBatch:
        """Return a step of the shards that this task has now."""
        if adapter is None:
            self.membership.group()  # raises if a task is missing since its script has ended
            raise TrainingError(
                "A loop of single batches keeps its shards. Received: others, "
                f"{list(self.membership.context.shards)}, in its middle. Start the job again, or use fit()."
            )
        adapter.assign_shards(self.membership.context.shards)
        if adapter is self._train_adapter:
            self.bookkeeper.restore(self.loop.position.at_step(epoch, step))
        return adapter.step_at(epoch, step)

    # See Resumable

    @property
    def prepared(self) -> bool:
        """Whether the model has been built and has its first weights."""
        return self._executors.were_made

    @property
    def state(self) -> ModelState:
        """The model's variables."""
        return read_state(self.model)

    @property
    def position(self) -> LoopPosition:
        """The unit that comes next."""
        return self.loop.position

    @property
    def replays(self) -> bool:
        """Whether a call is under way whose callbacks a replacement calls."""
        return self.loop.callbacks is not None

    @property
    def sets_up(self) -> bool:
        """Whether callbacks are called only for what can't be copied from another process."""
        return self.loop.sets_up

    def views(self) -> dict[str, Any]:
        """Return every variable's value by name, as it was behind the last unit."""
        return self.loop.gap.views(self.state)

    def state_dict(self) -> dict[str, Any]:
        """Return what another task needs to resume in the middle of the call under way."""
        chief = self.loop.callbacks.chief_memory.state_dict() if self.loop.callbacks is not None else []
        return {**self.loop.state_dict(), "chief": chief}

    def resume(self, state: dict[str, Any]) -> None:
        """Load another task's `state_dict()`: this task has reached that one's position."""
        self.loop.resume(state)
        if self.loop.callbacks is not None:
            self.loop.callbacks.chief_memory.load_state_dict(state["chief"])

    def begin_unit(self, group: Group, position: LoopPosition) -> None:
        """Have no changes of variables noted, and send all tasks what the chief's callbacks remember."""
        self.loop.gap.pause()
        if self.loop.callbacks is not None:
            self.loop.callbacks.share_memory(group, position, self.membership.chief_rank)

    def end_unit(self, position: LoopPosition) -> None:
        """Forget what callbacks have done before the unit that was done."""
        self.loop.end_unit(position)
        if self.loop.callbacks is not None:
            self.loop.callbacks.end_unit()


# Keeps what a call has left behind beside its result, and gives it to a task that doesn't make the call


@contextlib.contextmanager
def keeping_call(calls: CallCounter, loop: LoopState, callbacks: ResumableCallbacks) -> Iterator[None]:
    """Have a call done while open, whose events `callbacks` receive. If it ends well, `recall_call` gives
    others what they remember then, and the states of random generators, if somebody has drawn."""
    memory = callbacks.memory
    loop.callbacks = callbacks
    loop.take_memory(memory)
    before = read_random_states()
    try:
        yield
        calls.record_memory({"callbacks": memory.state_dict(), "random": find_drawn(before)})
    finally:
        loop.close()


def recall_call(calls: CallCounter, trainer: Resumable, given: list[Any], is_chief: bool) -> Any:
    """Return the result of a call that the others have finished, to which the script gives these
    callbacks."""
    result, kept = calls.recall(trainer), calls.recall_memory()
    history = result if isinstance(result, keras.callbacks.History) else None
    CallbackMemory(given, history, is_chief).load_state_dict(kept.get("callbacks", {}))
    load_random_states(kept.get("random", {}))
    return result


# Keeps apart what Keras' loop calls for a step of a model: Keras' own functions, and a trainer's


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
        #: Functions that Keras made last, by attribute. Written by `make`.
        self._made: dict[str, Any] = {}
        #: How often the model was compiled again. Written by `forget`.
        self._compilations = 0

    def make(self, attribute: str, make: Callable[[], Any]) -> Any:
        """Set the model's attribute to the function to call. `make` is Keras' own way."""
        if self.are_own and attribute in self._own:
            setattr(self._model, attribute, self._own[attribute])
            return self._own[attribute]
        result = make()
        self._made[attribute] = getattr(self._model, attribute)
        return result

    def forget(self) -> None:
        """Forget all functions: the model has been compiled again, which removed them."""
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
        """Raise TrainingError if the user has replaced one of these functions, or what makes it: the
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


# Predicts for one step after the other, and notifies callbacks of it as Keras does


class PredictionLoop:
    """Runs the steps of one `predict`. Callbacks receive whole executions of `steps_per_execution` steps."""

    def __init__(self, model: Any, callbacks: keras.callbacks.CallbackList, asked: int | None) -> None:
        """`asked` is the number of steps that the user gave."""
        self._model = model
        self._callbacks = callbacks
        self._per_execution = int(model.steps_per_execution)
        #: The number of steps at which to end: Keras does whole executions. None for all of the data.
        self._limit = -(-asked // self._per_execution) * self._per_execution if asked else None

    def run(
        self,
        read_steps: Callable[[int], Iterator[StepBatch]],
        outputs: list[Any],
        predict: Callable[[int, StepBatch], Any],
    ) -> Any:
        """Return the outputs for all rows. Those of the first steps may be there already; the others are
        appended. `read_steps` gives the steps from a number on, `predict` the outputs for one."""
        self._model.stop_predicting = False
        self._callbacks.on_predict_begin()
        index, done = 0, len(outputs)
        steps = itertools.chain(itertools.repeat(SKIPPED, done), read_steps(done))
        while index != self._limit and (batch := next(steps, None)) is not None:
            begin = index
            self._callbacks.on_predict_batch_begin(begin)
            while batch is not None:
                if index >= done:
                    outputs.append(predict(index, batch))
                index += 1
                batch = next(steps, None) if index % self._per_execution else None
            self._callbacks.on_predict_batch_end(index - 1, {"outputs": _concatenate(outputs[begin:index])})
            if self._model.stop_predicting:
                break
        self._callbacks.on_predict_end()
        return _concatenate(outputs)


def _concatenate(outputs: Sequence[Any]) -> Any:
    """Return the outputs of several steps as one."""
    if len(outputs) == 1:
        return outputs[0]
    return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *outputs)


# Decides which calls of a model need insitu, and which Keras does by itself


def needs_insitu(arguments: dict[str, Any]) -> bool:
    """Return whether a call with these arguments, by name, has rows to account for or a training to take
    up."""
    validation = arguments.get("validation_data")
    data = (arguments.get("x"), *(validation if isinstance(validation, tuple) else (validation,)))
    callbacks = flatten_callbacks(arguments.get("callbacks"))
    return any(isinstance(part, Dataset) for part in data) or any(
        getattr(callback, "restores_training", False) for callback in callbacks
    )


def warn_of_own_fit(model: Any) -> None:
    """Warn if a model has a `fit` of the user's own that seems to train without Keras' `fit` and without a
    custom loop: several replicas would train apart."""
    fit = getattr(type(model), "fit", None)
    if fit is None or fit is keras.Model.fit or not isinstance(fit, types.FunctionType):
        return
    if not {"fit", "run"}.intersection(_names_in(fit.__code__)):
        warnings.warn(
            "With several replicas a model trains together with the others in Keras' fit, or in a custom "
            f"loop. Received: {type(model).__name__}.fit, which seems to call neither super().fit nor "
            "strategy.run: each process would train a model of its own. Override train_step, or give the "
            "step to strategy.run.",
            stacklevel=2,
        )


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of attributes and globals that a function uses, with those of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
