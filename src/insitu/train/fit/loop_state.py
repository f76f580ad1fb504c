"""Holds the position of the call under way, and hands it to a task or a script that takes the call up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.exchange import Group
from insitu.train.elastic import BEGIN, EPOCH, TEST, LoopPosition
from insitu.train.fit.adapter import FeedAdapter
from insitu.train.fit.bookkeeping import Bookkeeper
from insitu.train.fit.callback_memory import CallbackMemory
from insitu.train.fit.chief_state import ChiefMemory
from insitu.train.fit.entry import (
    TRAIN_BEGIN,
    Entry,
    enter_at_beginning,
    enter_beside_others,
    enter_by_checkpoint,
    enter_without_memory,
    key_behind_epoch,
)
from insitu.train.fit.fit_strategy import FitStrategy
from insitu.train.fit.gap import Gap, load_random_states, read_random_states
from insitu.train.replica import (
    Logs,
    ModelState,
    count_calls_of_update,
    inner_optimizer,
    load_snapshot,
    read_call_count,
    read_state,
    read_update_count,
    to_numpy,
)

_RECORDED = frozenset({"logs", "epoch_logs", "memory", "random", "data", "validation"})
"""Parts of a checkpoint that a record on servers holds."""


class CallbacksOfCall(Protocol):
    """The callbacks of a call, as far as tasks do something about them together."""

    memory: CallbackMemory
    """State that they remember."""

    chief_memory: ChiefMemory
    """Sends all tasks what the chief's callbacks remember."""

    def share_memory(
        self, group: Group, position: LoopPosition, chief_rank: Callable[[Group], int | None]
    ) -> None:
        """Send all tasks what the chief's callbacks remember, if it may have changed. Collective."""

    def end_unit(self) -> None:
        """Forget what callbacks were like before the unit that was done."""


class LoopState:
    """Holds the position of one call of `fit`, `evaluate` or `predict`, and its results so far.

    Two others can take the call up in its middle. A replacement of a lost task gets the `state_dict()` of a
    survivor: it skips to behind the unit that the survivors did last (`stage`), calls callbacks again, and is
    in the survivors' unit then (`resume`). A script that runs again after a failure gets a checkpoint
    (`restore`). In both, `entry` decides which events callbacks receive.
    """

    def __init__(
        self, model: Any, bookkeeper: Bookkeeper, position: LoopPosition, strategy: FitStrategy
    ) -> None:
        self._model = model
        self._bookkeeper = bookkeeper
        self._strategy = strategy
        #: The unit that comes next. Written by `KerasTrainer` behind each step, and here.
        self.position = position
        #: The step at which this task entered the epoch under way: callbacks receive no step before.
        self.first_step = 0
        #: The test step at which this task entered the tests: callbacks receive none before.
        self.first_test = 0
        #: Logs of the last training step, and of the last test step. Written by `KerasTrainer`.
        self.logs: Logs = {}
        self.test_logs: Logs = {}
        #: Steps since replicas were last compared. Written by `KerasTrainer`.
        self.steps_since_check = 0
        #: Values of the metrics as the tests of the epoch began, by variable name; empty before.
        self.metrics_before_tests: dict[str, Any] = {}
        #: Outputs of the steps of a `predict`. Written by `KerasTrainer`.
        self.outputs: list[Any] = []
        #: Positions of the seeds of a fit on servers.
        self.seeds = SeedRecord()
        #: Changes since the last unit, by callbacks.
        self.gap = Gap(model)
        #: The position at which this process enters the fit. Written by `stage` and `restore`.
        self.entry = Entry()
        #: The state of callbacks that the entry gives them, as `CallbackMemory` has it.
        self.memory_at_entry: dict[str, Any] = {}
        #: States of random generators that the entry sets.
        self._random_at_entry: dict[str, Any] = {}
        #: Logs of the last epoch that has ended, with those of its validation; None before. Written by
        #: the list of callbacks.
        self.epoch_logs: Logs | None = None
        #: The list of the call's callbacks, which a replacement calls; None before and after. Written by
        #: `keeping_call`.
        self.callbacks: CallbacksOfCall | None = None
        #: Keras' adapter for the data of a fit; None in other calls. Written by `KerasTrainer`.
        self.data: FeedAdapter | None = None
        #: Keras' adapter for the data of its validation; else None. Written by `KerasTrainer`.
        self.validation: FeedAdapter | None = None
        #: Whether the fit has come to its end. Written by `KerasTrainer`.
        self.fit_has_ended = False
        #: Values of the metrics in the middle of the epoch that will be entered, by variable name.
        self._metrics_to_restore: dict[str, Any] = {}
        #: A survivor's state, from `stage` to `resume`, with the test steps that are yet to be skipped.
        self._staged: dict[str, Any] | None = None
        #: Whether the last unit that was done is the beginning of the fit. Written by `end_unit`.
        self.has_begun_only = False
        #: Whether callbacks are called only for what can't be copied. Written by `setting_up`.
        self.sets_up = False
        #: Whether training must stop, as the entry sets it; None once that was done.
        self._stop_at_entry: bool | None = None

    @property
    def callback_memory(self) -> CallbackMemory | None:
        """State of the callbacks of the call; None before and after."""
        return self.callbacks.memory if self.callbacks is not None else None

    @property
    def model_state(self) -> ModelState:
        """The model's variables."""
        return read_state(self._model)

    def show_updates(self) -> None:
        """Have the model's optimizer count the updates that were made elsewhere."""
        self._strategy.show_updates()

    def count_updates(self, position: LoopPosition) -> int | None:
        """Return how many updates the model has had at `position`, in all runs of the script; None if that
        isn't known."""
        optimizer = getattr(self._model, "optimizer", None)
        on_servers = self._strategy.count_updates()
        if on_servers is not None:
            return on_servers // count_calls_of_update(optimizer)
        if optimizer is not None and read_call_count(optimizer):
            return read_update_count(optimizer)
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
        """Start the fit at this step: another run of the script did the earlier ones."""
        self.position = self.position.at_step(epoch, step)
        self.entry = enter_without_memory(epoch, step)
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
            self.enter_stop()
        self._metrics_to_restore = {}

    def begin_tests(self) -> None:
        """Begin a validation or an `evaluate`, in its middle if the others are there."""
        self.position = self.position.at_test(self.first_test)

    @contextlib.contextmanager
    def testing(self) -> Iterator[None]:
        """Do a validation or an `evaluate` while open."""
        self.begin_tests()
        with self._bookkeeper.evaluating():
            yield

    def end_steps(self) -> None:
        """Come to the end of the epoch: its steps and tests are done."""
        self.position = self.position.at_epoch_end()

    def report_epoch_logs(self, logs: Mapping[str, Any]) -> None:
        """Report the logs of the epoch's end, with those of its validation."""
        self._bookkeeper.reporter.sampler.end_epoch(logs)

    def end_unit(self, position: LoopPosition) -> None:
        """Forget what has changed before the unit at `position`, which was done."""
        self.has_begun_only = position.kind == BEGIN
        self.gap.close()

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
        self._staged["skips"] -= 1
        if not self._staged["is_fit"] and not self._staged["skips"]:
            # A callback that ended the tests before their last step isn't called again.
            self._model.stop_evaluating = self.entry.is_at_end
            load_random_states(self._random_at_entry)
        return dict(self._staged["test_logs"])

    def end_skipped_steps(self) -> None:
        """Come to the first step that others haven't done."""
        self.enter_stop()
        # Some data has drawn random numbers in this process.
        load_random_states(self._random_at_entry)

    def enter_stop(self) -> None:
        """Take over whether training must stop, which Keras asks after each step. Not before: it would skip
        fewer steps."""
        if self._stop_at_entry is not None:
            self._model.stop_training, self._stop_at_entry = self._stop_at_entry, None

    # Another task takes the call up

    def metrics_behind_last_unit(self) -> dict[str, Any]:
        """Return what the metrics' variables held when callbacks were first called since the last unit."""
        values = self.gap.views(self.model_state)
        return {name: np.array(values[name]) for name in self.metrics()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a replacement needs to resume behind the unit that was done last."""
        memory, metrics = self.callback_memory, self.metrics_behind_last_unit()
        return {
            "steps_since_check": self.steps_since_check,
            "logs": as_floats(self.logs),
            "test_logs": as_floats(self.test_logs),
            "epoch_logs": None if self.epoch_logs is None else as_floats(self.epoch_logs),
            "metrics": metrics,
            "metrics_before_tests": self.metrics_before_tests or metrics,
            "outputs": list(self.outputs),
            "stop_training": self.gap.stop_training,
            "heard_at_entry": list(self.entry.heard),
            "has_begun_only": self.has_begun_only,
            "memory_at_entry": self.memory_at_entry,
            "random": self.gap.random_states,
            "callback_memory": memory.transfer() if memory is not None else {},
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

    def stage(self, position: LoopPosition, state: dict[str, Any], *, is_fit: bool = False) -> None:
        """Skip to behind the unit that the survivors did last: they are at `position` now."""
        self._staged = {**state, "is_fit": is_fit, "skips": position.test}
        self.first_test = position.test
        self.outputs = list(state["outputs"])
        self._random_at_entry = state["random"]
        if not is_fit:
            self.entry = enter_beside_others(position, None)
        else:
            self.position = self.position.at_step(position.epoch, position.step)
            self.has_begun_only = state["has_begun_only"]
            heard: Any = tuple(state["heard_at_entry"])
            if position.kind == BEGIN:
                # They have entered by a checkpoint, or at the beginning, as this task does now.
                self.entry = enter_at_beginning(heard, position.epoch, position.step)
                self.memory_at_entry = state["memory_at_entry"]
            else:
                self.entry = enter_beside_others(position, heard if self.has_begun_only else None)
                self._stop_at_entry = state["stop_training"]
            self._metrics_to_restore = state["metrics_before_tests"]
            self.logs, self.epoch_logs = state["logs"], state["epoch_logs"]
            self._model.stop_training = False
            self._load_data_state(state["data"])
            self._load_validation_state(state["validation"])

    def take_memory(self, memory: CallbackMemory) -> None:
        """Take what the survivors' callbacks remembered, which `memory` gives those of this task."""
        if self._staged is not None:
            received = memory.receive(self._staged["callback_memory"])
            if self.entry.was_heard(TRAIN_BEGIN) and not self.memory_at_entry:
                self.memory_at_entry = received

    def resume(self, state: dict[str, Any]) -> None:
        """Become as the survivors are: this task has come to their position."""
        enters_fit = self._staged is not None and self._staged["is_fit"]
        self._staged = None
        self.first_test = 0
        self.steps_since_check = state["steps_since_check"]
        self.logs, self.test_logs = state["logs"], state["test_logs"]
        tests_have_begun = self.position.kind in (TEST, EPOCH)
        self.metrics_before_tests = state["metrics_before_tests"] if tests_have_begun else {}
        if enters_fit:
            self._bookkeeper.restore(self.position)
            self.enter_stop()
        else:
            self._model.stop_training = state["stop_training"]

    # A script that runs again takes the fit up

    def checkpoint_extras(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the position and the variables."""
        memory = self.callback_memory
        return {
            "logs": as_floats(self.logs),
            "epoch_logs": None if self.epoch_logs is None else as_floats(self.epoch_logs),
            "memory": memory.state_dict() if memory is not None else {},
            "random": read_random_states(),
            "data": self._data_state(),
            "validation": self._validation_state(),
        }

    def restore(self, epoch: int, step: int, values: dict[str, Any], extras: dict[str, Any]) -> None:
        """Continue at this step with the variables of a checkpoint, and with its `checkpoint_extras()`."""
        load_snapshot(self.model_state, values)
        self.gap.rebase()
        self._metrics_to_restore = self.metrics()
        self.logs, self.epoch_logs = extras["logs"], extras.get("epoch_logs")
        self.memory_at_entry = extras["memory"]
        self._random_at_entry = extras.get("random", {})
        self._load_data_state(extras.get("data"))
        self._load_validation_state(extras.get("validation"))
        self.start_at(epoch, step)
        self.entry = enter_by_checkpoint(epoch, step)

    def record_restored(self, *, is_forgotten: bool) -> None:
        """Enter by the checkpoint that was restored, if one was. If it `is_forgotten` how far the job came
        behind that, callbacks may have received the rest of the epoch."""
        if is_forgotten and self._staged is None:
            self.entry = replace(self.entry, repeated=key_behind_epoch(self.position.epoch))

    def forget_callbacks(self) -> None:
        """Let a fit that was restored begin at the other's position: its callbacks remember nothing."""
        self.memory_at_entry, self._random_at_entry = {}, {}
        self.logs, self.epoch_logs = {}, None
        self.entry = enter_without_memory(self.position.epoch, self.position.step)

    def enter_at_end(self) -> None:
        """Let a fit that was restored have no further epoch."""
        self.entry = replace(self.entry, is_at_end=True)

    def record_state(self) -> dict[str, Any]:
        """Return what a record holds of a fit on servers."""
        metrics = self.metrics_before_tests or self.metrics()
        extras = {name: value for name, value in self.checkpoint_extras().items() if name in _RECORDED}
        seeds = self.seeds.record(self.model_state, self.position.epoch, self.position.step)
        return {"metrics": metrics, "seeds": seeds, "rate": self._read_rate(), **extras}

    def _read_rate(self) -> float | None:
        rate = getattr(inner_optimizer(getattr(self._model, "optimizer", None)), "_learning_rate", None)
        return None if rate is None or not hasattr(rate, "assign") else float(to_numpy(rate))

    def take_record(
        self, place: tuple[int, int], entry: Entry, state: dict[str, Any], *, is_newest: bool
    ) -> None:
        """Continue at this (epoch, step) by what an earlier process of this task has recorded. `is_newest`:
        it did no step since. Otherwise the servers know its learning rate better."""
        if is_newest and state["rate"] is not None:
            inner_optimizer(self._model.optimizer)._learning_rate.assign(state["rate"])
        self.logs, self.epoch_logs = state["logs"], state["epoch_logs"]
        self.memory_at_entry, self._random_at_entry = state["memory"], state["random"]
        self._load_data_state(state["data"])
        self._load_validation_state(state["validation"])
        self.start_at(*place)
        self.seeds.restore(self.model_state, state["seeds"], *place)
        self.entry = entry
        self._metrics_to_restore = state["metrics"]

    @contextlib.contextmanager
    def setting_up(self) -> Iterator[None]:
        """Call callbacks while open only for what can't be copied: their changes of the model are undone, and
        they have the state of the entry afterwards. Later changes are those that others make, too."""
        self.sets_up = True
        try:
            with self.gap.reverting():
                yield
        finally:
            self.sets_up = False
        self.restore_callbacks()
        if self.callback_memory is not None:
            self.callback_memory.release()

    def restore_callbacks(self) -> None:
        """Give the callbacks, and the random generators, the state of the entry."""
        if self.callback_memory is not None:
            self.callback_memory.load_state_dict(self.memory_at_entry)
        load_random_states(self._random_at_entry)

    def close(self) -> None:
        """End a call, whether it ended well or not: let go of its callbacks."""
        self.gap.close()
        if self.callback_memory is not None:
            self.callback_memory.close()
        self.callbacks = self.data = self.validation = None


def as_floats(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return logs as Python's numbers; a step may leave them in the backend's own scalars."""
    return {name: float(value) for name, value in logs.items()}


# Records how far the seeds of a model's layers are, for a worker that trains on servers


class SeedRecord:
    """How far each seed generator is: servers don't hold them, and a step moves each by the same amount.

    So their positions in the middle of an epoch follow from those at its beginning, once one epoch
    has shown by how much a step moves them.
    """

    def __init__(self) -> None:
        #: The seeds at the last record, and its epoch; None before.
        self._noted: tuple[NDArray[np.int64], int] | None = None
        #: By how much a step moves them; None until that is known.
        self._stride: NDArray[np.int64] | None = None

    def record(self, state: ModelState, epoch: int, step: int) -> dict[str, Any]:
        """Return the seeds, before step `step` of `epoch` or behind all its steps, and what a step moves."""
        now = _read(state)
        if step and self._noted is not None and self._noted[1] == epoch:
            self._stride = (now - self._noted[0]) // step
        if step == 0:
            self._noted = now, epoch
        return {"seeds": now, "epoch": epoch, "step": step, "stride": self._stride}

    def restore(self, state: ModelState, found: dict[str, Any], epoch: int, step: int) -> None:
        """Set the seeds to what they are at this step, as far as the record shows that."""
        seeds, self._stride = np.array(found["seeds"]), found["stride"]
        steps = step - found["step"] if epoch == found["epoch"] else step
        if steps > 0 and self._stride is not None:
            seeds = seeds + steps * self._stride
        for variable, value in zip(state.seeds, seeds, strict=True):
            variable.assign(value.astype(to_numpy(variable).dtype))


def _read(state: ModelState) -> NDArray[np.int64]:
    values = [to_numpy(variable).astype(np.int64) for variable in state.seeds]
    return np.stack(values) if values else np.zeros((0, 2), np.int64)
