"""Records a script's calls under a strategy: a replacement needs them to resume in their middle.

A *call* is one `fit`, `evaluate` or `predict` that the script makes (not one that another call makes). A
replacement runs the script from its start: finished calls return at once what they returned to the others,
the one under way is entered in its middle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import keras

from insitu.base.errors import TrainingError
from insitu.base.serialization import NotSerializable, copy_value, encode
from insitu.exchange import Group
from insitu.train.elastic.divergence import Fingerprint
from insitu.train.elastic.lockstep import ResumePoint
from insitu.train.elastic.position import Kind, LoopPosition
from insitu.train.replica import ModelState, load_snapshot, to_numpy, view

KEPT_BYTES = 256 << 20
"""Results of finished calls that are kept for a replacement, at most."""


class Resumable(Protocol):
    """A model's trainer, as far as a replacement takes over its state."""

    @property
    def model(self) -> Any:
        """The compiled Keras model."""

    @property
    def number(self) -> int:
        """The number that `CallLog.register` returned for it."""

    @property
    def prepared(self) -> bool:
        """Whether the model has been built and has its first weights."""

    @property
    def state(self) -> ModelState:
        """The model's variables."""

    @property
    def replays(self) -> bool:
        """Whether a replacement runs the code between the last unit and the next, and has the state behind
        the last one for that, before it comes to the next."""

    @property
    def sets_up(self) -> bool:
        """Whether callbacks are called only for what can't be copied from another process."""

    def views(self) -> dict[str, Any]:
        """Return every variable's value by name, as it was behind the last unit."""

    @property
    def position(self) -> LoopPosition:
        """The unit that comes next."""

    def state_dict(self) -> dict[str, Any]:
        """Return what another task needs to resume in the middle of the call under way."""

    def resume(self, state: dict[str, Any]) -> None:
        """Load another task's `state_dict()`: this task has reached that one's position."""

    def begin_unit(self, group: Group, position: LoopPosition) -> None:
        """See `StateProvider`, for a unit of a call that isn't in the middle of another."""

    def end_unit(self, position: LoopPosition) -> None:
        """See `StateProvider`, for a unit of a call that isn't in the middle of another."""


class CallCounter:
    """The calls of a script, and the models that it has compiled, by number.

    Keeps nothing of a call: no other task enters one. `CallLog` is for tasks that can take another's place.
    """

    def __init__(self) -> None:
        #: Each compiled model's trainer, by number. Written by `register`.
        self._trainers: list[weakref.ref[Resumable]] = []
        #: Number of calls that are finished.
        self._finished = 0
        #: How many calls are under way, one in the middle of another.
        self._depth = 0

    def register(self, trainer: Resumable) -> int:
        """Return the number of a model that was compiled under the strategy."""
        self._trainers.append(weakref.ref(trainer))
        return len(self._trainers) - 1

    @property
    def depth(self) -> int:
        """How many calls are under way, one in the middle of another."""
        return self._depth

    @property
    def is_under_way(self) -> bool:
        """Whether a call is under way."""
        return self._depth > 0

    def position(self, kind: Kind) -> LoopPosition:
        """Return the position of the first unit of a kind in the call under way."""
        return LoopPosition(self._finished, kind, self._depth)

    def run(self, trainer: Resumable, call: Callable[[], Any]) -> Any:
        """Make a call of the script."""
        self._depth += 1
        try:
            result = call()
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._finish(result)
        return result

    def _finish(self, result: Any) -> None:
        """Count a call that isn't in the middle of another, which has returned `result`."""
        self._finished += 1

    def record_memory(self, memory: Any) -> None:
        """Take what the callbacks of the fit under way, which is over, remember."""

    def recall_memory(self) -> Any:
        """Return what the callbacks of a finished fit remember."""
        return {}

    def is_finished(self, point: ResumePoint | None) -> bool:
        """Return whether the others, who are at `point`, have finished the call under way, so that `recall`
        has its result."""
        return False

    def recall(self, trainer: Resumable) -> Any:
        """Return the result of a finished call; its model gets the state that it has at the others'."""
        raise TrainingError("No result of a call is kept here. Ask `is_finished` before `recall`.")

    def staged_call(self, point: ResumePoint | None) -> tuple[LoopPosition, dict[str, Any]] | None:
        """Return the others' position and state in the call under way, if this task enters it in its
        middle."""
        return None


class CallLog(CallCounter):
    """Keeps what a replacement needs to resume in the middle of a script's calls."""

    def __init__(self) -> None:
        super().__init__()
        #: Results of finished calls, by number.
        self._results: dict[int, Any] = {}
        #: State of callbacks at the end of finished fits, by number.
        self._memories: dict[int, Any] = {}
        #: Bytes in `_results` and `_memories`.
        self._kept_bytes = 0
        #: The trainer of the innermost call under way.
        self._under_way: Resumable | None = None
        #: A survivor's state, from `stage` to `resume`.
        self._staged: dict[str, Any] = {}
        #: Whether all finished calls were kept, so that a replacement can be given them.
        self.complete = True
        #: Calls in the middle of the one under way, since its last unit, with what they have left behind.
        #: Written by `_record_nested` and `end_unit`.
        self._nested: list[dict[str, Any]] = []
        #: Those of a survivor that callbacks are going to make again here.
        self._nested_to_recall: list[dict[str, Any]] = []

    # Calls

    def run(self, trainer: Resumable, call: Callable[[], Any]) -> Any:
        """Make a call. Its result is kept for replacements."""
        if self._depth == 1 and self._staged:
            return self._recall_nested(trainer)
        outer, self._under_way = self._under_way, trainer
        try:
            result = super().run(trainer, call)
        finally:
            self._under_way = outer
        if self._depth == 1:
            self._record_nested(trainer, result)
        return result

    def _finish(self, result: Any) -> None:
        self._kept_bytes += self._keep(result, lambda value: self._results.update({self._finished: value}))
        super()._finish(result)

    def _keep(self, result: Any, store: Callable[[Any], None]) -> int:
        """Keep what a call has returned, unless that can't be copied or is too large; return its bytes."""
        value = result
        if isinstance(result, keras.callbacks.History):
            value = {"history": result.history, "epoch": result.epoch, "params": result.params}
        try:
            size = sum(array.nbytes for array in encode(value).arrays)
        except NotSerializable:
            value, size = None, KEPT_BYTES + 1
        if self._kept_bytes + size > KEPT_BYTES:
            self.complete = False
            return 0
        store(value)
        return size

    @property
    def _sets_up(self) -> bool:
        """Whether the callback that makes a call is called only for what can't be copied."""
        return self._under_way is not None and self._under_way.sets_up

    def _record_nested(self, trainer: Resumable, result: Any) -> None:
        """Keep a call that a callback has made: who takes this task's place makes it again, by itself."""
        if isinstance(result, keras.callbacks.History):
            self.complete = False  # it has trained: what it has left behind isn't known
            return
        moved = {id(variable) for variable in trainer.state.moved_in_tests}
        left = {name: to_numpy(v) for name, v in trainer.state.named() if id(v) in moved}
        kept = {"model": trainer.number, "sets_up": self._sets_up, "left": left}
        self._keep(result, lambda value: self._nested.append({**kept, "result": copy_value(value)}))

    def _recall_nested(self, trainer: Resumable) -> Any:
        """Return what the others keep of a call that a callback makes here again."""
        recalled = self._nested_to_recall.pop(0) if self._nested_to_recall else None
        if recalled is None or (recalled["model"], recalled["sets_up"]) != (trainer.number, self._sets_up):
            before = "none" if recalled is None else f"one of model {recalled['model']}"
            raise TrainingError(
                "A callback makes the same calls each time that it hears of an event, and none where it "
                f"opens something. Received: a call of model {trainer.number}, where the others made "
                f"{before}. Make calls in a callback that opens nothing, or start the job again."
            )
        for name, variable in trainer.state.named():
            if name in recalled["left"]:
                variable.assign(recalled["left"][name])
        self._nested.append(recalled)
        return recalled["result"]

    def record_memory(self, memory: Any) -> None:
        """Keep what callbacks remember: a script may ask them. Values that are too large are left out."""
        size = sum(array.nbytes for array in encode(memory).arrays)
        if self._depth == 1 and self._kept_bytes + size <= KEPT_BYTES:
            self._kept_bytes += size
            self._memories[self._finished] = copy_value(memory)

    def recall_memory(self) -> Any:
        return self._memories.get(self._finished, {})

    def is_finished(self, point: ResumePoint | None) -> bool:
        return self._depth == 1 and point is not None and self._finished < int(self._staged["call"])

    def recall(self, trainer: Resumable) -> Any:
        self._load(trainer)
        result = self._results[self._finished]
        if isinstance(result, dict) and result.keys() == {"history", "epoch", "params"}:
            history = keras.callbacks.History()
            history.set_model(trainer.model)
            history.set_params(result["params"])
            history.history, history.epoch = result["history"], result["epoch"]
            trainer.model.history = history
            return history
        return result

    def staged_call(self, point: ResumePoint | None) -> tuple[LoopPosition, dict[str, Any]] | None:
        if self._depth != 1 or point is None or self._finished != int(self._staged["call"]):
            return None
        if point.position.is_setup:
            return None
        trainer = self._under_way
        if trainer is not None:
            # Before callbacks see the model.
            self._load(trainer)
        return point.position, self._staged["under_way"]

    # See StateProvider

    def state_dict(self) -> Any:
        """Return finished calls, all models' variables, and the state of the call under way."""
        under_way = self._under_way
        states = {}
        for number, reference in enumerate(self._trainers):
            trainer = reference()
            if trainer is not None and trainer.prepared:
                states[number] = trainer.views()
        return {
            "nested": list(self._nested),
            "call": self._finished,
            "results": dict(self._results),
            "memories": dict(self._memories),
            "states": states,
            "under_way": under_way.state_dict() if under_way is not None and under_way.prepared else {},
        }

    def stage(self, state: Any) -> None:
        """Keep a survivor's state; take over its finished calls."""
        self._staged = state
        self._nested_to_recall = list(state["nested"])
        self._results = dict(state["results"])
        self._memories = dict(state["memories"])

    def resume(self, position: LoopPosition) -> None:
        """Load the staged state into all models. Raises TrainingError if no call is under way that others can
        enter."""
        trainer = self._under_way
        if trainer is None or self._finished != int(self._staged["call"]):
            raise TrainingError(
                f"A replacement can't continue in the middle of {position.kind!r}. Start the job again."
            )
        for reference in self._trainers:
            other = reference()
            is_entered = other is trainer and trainer.replays and not position.is_setup
            if other is not None and other.prepared and not is_entered:
                self._load(other, last=True)
        if not position.is_setup:
            trainer.resume(self._staged["under_way"])
        self._staged, self._nested_to_recall = {}, []

    def begin_unit(self, group: Group, position: LoopPosition) -> None:
        """Have the trainer of the call under way prepare for a unit of it."""
        if self._under_way is not None and position.depth == 1 and not position.is_setup:
            self._under_way.begin_unit(group, position)

    def end_unit(self, position: LoopPosition) -> None:
        """Forget what was done before the unit that was done."""
        if self._under_way is not None and position.depth == 1 and not position.is_setup:
            self._nested = []
            self._under_way.end_unit(position)

    def fingerprint(self) -> Fingerprint:
        """Return hashes of the variables and the position of the model that is being trained."""
        trainer = self._under_way
        if trainer is None:
            return Fingerprint(())
        values = ((name, view(variable)) for name, variable in trainer.state.named())
        return Fingerprint(values, trainer.position.numbers)

    def _load(self, trainer: Resumable, *, last: bool = False) -> None:
        """Load the staged variables of a model; `last` if they are loaded for the last time."""
        state = self._staged["states"].get(trainer.number)
        if state is None:
            return
        if last:
            load_snapshot(trainer.state, state, donate=True)
            return
        # The others may have compiled the model again since, and have other variables beside the weights.
        for name, variable in trainer.state.named():
            if name in state and tuple(variable.shape) == state[name].shape:
                variable.assign(state[name])
