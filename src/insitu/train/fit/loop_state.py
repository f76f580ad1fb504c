"""Holds where the call under way is, and hands it over to a task or a script that takes the call up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from insitu.train.elastic import EPOCH, TEST, LoopPosition
from insitu.train.fit.adapter import FeedAdapter
from insitu.train.fit.bookkeeping import Bookkeeper
from insitu.train.fit.callback_memory import CallbackMemory
from insitu.train.fit.fit_strategy import FitStrategy
from insitu.train.replica import Logs, ModelState, load_snapshot, read_state, to_numpy


class LoopState:
    """Holds where one call of `fit`, `evaluate` or `predict` is, and its results so far.

    Two others can take the call up in its middle. A replacement of a lost task gets the `state_dict()` of a
    survivor: it skips to the survivors' position (`stage`), then is as they are (`resume`). A script that
    runs again after a failure gets a checkpoint (`restore`, `restore_callbacks`).
    """

    def __init__(
        self, model: Any, bookkeeper: Bookkeeper, position: LoopPosition, strategy: FitStrategy
    ) -> None:
        self._model = model
        self._bookkeeper = bookkeeper
        self._strategy = strategy
        #: The unit that comes next. Written by `KerasTrainer` behind each step, and here.
        self.position = position
        #: The step at which this task entered the epoch under way: callbacks hear of no step before.
        self.first_step = 0
        #: The test step at which this task entered the tests: callbacks hear of none before.
        self.first_test = 0
        #: Logs of the last training step, and of the last test step. Written by `KerasTrainer`.
        self.logs: Logs = {}
        self.test_logs: Logs = {}
        #: Steps since replicas were last compared. Written by `KerasTrainer`.
        self.steps_since_check = 0
        #: What the metrics held when the tests of the epoch began, by variable name; else empty.
        self.metrics_before_tests: dict[str, Any] = {}
        #: Outputs of the steps of a `predict`. Written by `KerasTrainer`.
        self.outputs: list[Any] = []
        #: What the callbacks of a fit remember while it lasts; None in other calls. Written by
        #: `KerasTrainer`.
        self.callback_memory: CallbackMemory | None = None
        #: What Keras reads the data of a fit through; None in other calls. Written by `KerasTrainer`.
        self.data: FeedAdapter | None = None
        #: What Keras reads the data of its validation through; else None. Written by `KerasTrainer`.
        self.validation: FeedAdapter | None = None
        #: Whether the fit has come to its end. Written by `KerasTrainer`.
        self.fit_has_ended = False
        #: What the metrics held in the middle of the epoch that is to be entered, by variable name.
        self._metrics_to_restore: dict[str, Any] = {}
        #: A survivor's state, from `stage` to `resume`.
        self._staged: dict[str, Any] | None = None
        #: Variables and callbacks' memory of a checkpoint, from `restore` to `restore_callbacks`.
        self._checkpoint: tuple[dict[str, Any], dict[str, Any]] | None = None

    @property
    def model_state(self) -> ModelState:
        """The model's variables."""
        return read_state(self._model)

    def count_updates(self, position: LoopPosition) -> int | None:
        """Return how many updates the model has had at `position`, in all runs of the script; None where that
        isn't known."""
        on_servers = self._strategy.count_updates()
        if on_servers is not None:
            return on_servers
        optimizer = getattr(self._model, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        count = int(to_numpy(optimizer.iterations)) if optimizer is not None else 0
        if count:
            return count
        # A model that updates itself has no optimizer that counts.
        before = self.data.epoch_lengths.count(position.epoch) if self.data is not None else None
        return None if before is None else before + position.step

    def metrics(self) -> dict[str, Any]:
        """Return what the metrics' variables hold, by name."""
        state = self.model_state
        metrics = {id(variable) for variable in (*state.sums, *state.metric_first)}
        return {name: to_numpy(v) for name, v in state.named() if id(v) in metrics}

    def _assign(self, values: dict[str, Any]) -> None:
        variables = dict(self.model_state.named())
        for name, value in values.items():
            variables[name].assign(value)

    # How the position advances beside the steps, which KerasTrainer counts

    def start_at(self, epoch: int, step: int) -> None:
        """Start the fit at this step: those before were done by another run of the script."""
        self.position = self.position.at_step(epoch, step)
        self._bookkeeper.restore(self.position)

    def begin_epoch(self, epoch: int) -> None:
        """Enter `epoch`, whose metrics Keras has reset, in its middle if the position is there."""
        step = self.position.step if epoch == self.position.epoch else 0
        self.position = self.position.at_step(epoch, step)
        self.first_step = step
        self.test_logs, self.metrics_before_tests = {}, {}
        if step:
            self._assign(self._metrics_to_restore)
        else:
            self.logs = {}
        self._metrics_to_restore = {}

    def begin_tests(self) -> None:
        """Begin a validation or an `evaluate`, in its middle where the others are there."""
        self.position = self.position.at_test(self.first_test)

    @contextlib.contextmanager
    def testing(self) -> Iterator[None]:
        """Do a validation or an `evaluate` while open."""
        self.begin_tests()
        with self._bookkeeper.evaluating():
            yield
        self.metrics_before_tests = {}

    def end_steps(self) -> None:
        """Come to the end of the epoch: its steps and tests are done."""
        self.position = self.position.at_epoch_end()

    def report_epoch_logs(self, logs: Mapping[str, Any]) -> None:
        """Report the logs of the epoch's end, with those of its validation."""
        self._bookkeeper.reporter.sampler.end_epoch(logs)

    def end_epoch(self) -> None:
        """Leave the epoch: all is done that belongs to it."""
        self.position = self.position.at_step(self.position.epoch + 1, 0)

    # Steps that were done before this task came

    def skip_step(self) -> Logs:
        """Return as much as is known of the logs of a training step that was done before."""
        return dict(self.logs) or as_floats(self._model.get_metrics_result())

    def skip_test(self) -> Logs:
        """Return the logs of a test step that was done before; the metrics become as they are now."""
        if self._staged is None:
            return {}
        self._assign(self._staged["metrics"])
        return dict(self._staged["test_logs"])

    def end_skipped_steps(self) -> None:
        """Take over whether training is to stop, which Keras asks after each step."""
        if self._staged is not None:
            self._model.stop_training = self._staged["stop_training"]

    # Another task takes the call up

    def state_dict(self) -> dict[str, Any]:
        """Return what a replacement needs to go on at this position."""
        memory = self.callback_memory
        return {
            "steps_since_check": self.steps_since_check,
            "logs": as_floats(self.logs),
            "test_logs": as_floats(self.test_logs),
            "metrics": self.metrics(),
            "metrics_before_tests": self.metrics_before_tests or self.metrics(),
            "outputs": list(self.outputs),
            "stop_training": bool(getattr(self._model, "stop_training", False)),
            "callback_memory": memory.state_dict() if memory is not None else {},
            "data": self._data_state(),
            "validation": self._validation_state(),
        }

    def _validation_state(self) -> dict[str, int] | None:
        if self.validation is None:
            return None
        return self.validation.tests_state_dict(under_way=self.position.kind == TEST)

    def _load_validation_state(self, state: dict[str, int] | None) -> None:
        if self.validation is not None and state is not None:
            self.validation.load_tests_state_dict(state)

    def _data_state(self) -> dict[str, int] | None:
        return self.data.state_dict(self.position.epoch) if self.data is not None else None

    def _load_data_state(self, state: dict[str, int] | None) -> None:
        if self.data is not None and state is not None:
            self.data.load_state_dict(state)

    def stage(self, position: LoopPosition, state: dict[str, Any]) -> None:
        """Skip to the survivors' `position`; what they have done before isn't done again."""
        self._staged = state
        self.first_test = position.test
        self.outputs = list(state["outputs"])
        if self.callback_memory is not None:
            self.position = self.position.at_step(position.epoch, position.step)
            self._metrics_to_restore = state["metrics_before_tests"]
            self.logs = state["logs"]
            self.callback_memory.append_to_logs(position.epoch)
            self._load_data_state(state["data"])
            self._load_validation_state(state["validation"])

    def resume(self, state: dict[str, Any]) -> None:
        """Become as the survivors are: this task has come to their position."""
        self._staged = None
        self.first_test = 0
        self.steps_since_check = state["steps_since_check"]
        self.logs, self.test_logs = state["logs"], state["test_logs"]
        tests_have_begun = self.position.kind in (TEST, EPOCH)
        self.metrics_before_tests = state["metrics_before_tests"] if tests_have_begun else {}
        self._model.stop_training = state["stop_training"]
        if self.callback_memory is not None:
            self.callback_memory.load_state_dict(state["callback_memory"])
            self._bookkeeper.restore(self.position)

    # A script that runs again takes the fit up

    def checkpoint_extras(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the position and the variables."""
        memory = self.callback_memory
        return {
            "logs": as_floats(self.logs),
            "memory": memory.state_dict() if memory is not None else {},
            "data": self._data_state(),
            "validation": self._validation_state(),
        }

    def restore(self, epoch: int, step: int, values: dict[str, Any], extras: dict[str, Any]) -> None:
        """Go on at this step with the variables of a checkpoint, and with its `checkpoint_extras()`."""
        load_snapshot(self.model_state, values)
        self._metrics_to_restore = self.metrics()
        self.logs = extras["logs"]
        self._checkpoint = (values, extras["memory"])
        self._load_data_state(extras.get("data"))
        self._load_validation_state(extras.get("validation"))
        self.start_at(epoch, step)
        if self.callback_memory is not None:
            self.callback_memory.append_to_logs(epoch)

    def restore_callbacks(self, *, epoch_has_begun: bool) -> None:
        """Give the callbacks what a checkpoint remembers of them, at the point where it was saved.

        That is before they hear of an epoch's beginning, or behind it, where the epoch is entered in its
        middle: then what they change of the model at its beginning is undone too.
        """
        if self._checkpoint is None or self.callback_memory is None:
            return
        if epoch_has_begun != (self.position.step > 0):
            return
        (values, memory), self._checkpoint = self._checkpoint, None
        self.callback_memory.load_state_dict(memory)
        if epoch_has_begun:
            load_snapshot(self.model_state, values)

    def close(self) -> None:
        """End a fit, whether it ended well or not: let go of its callbacks."""
        self.callback_memory = self._checkpoint = self.data = self.validation = None


def as_floats(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return logs as Python's numbers; a step may leave them in the backend's own scalars."""
    return {name: float(value) for name, value in logs.items()}
