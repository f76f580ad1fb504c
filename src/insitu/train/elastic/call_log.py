"""What a script has done under a strategy so far, by calls: what a replacement must know to go on in it.

A *call* is one `fit`, `evaluate` or `predict` that the script makes (not one that another call makes). A
replacement runs the script from its start: finished calls return at once what they returned to the others,
the one under way is entered in its middle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from insitu.errors import TrainingError
from insitu.train.collectives import NotSerializable, copy_value, encode
from insitu.train.elastic.divergence import Fingerprint
from insitu.train.elastic.lockstep import SETUP, Key, Lockstep
from insitu.train.replica import load_snapshot, view, views

if TYPE_CHECKING:
    from insitu.train.fit import Binding

KEPT_BYTES = 256 << 20
"""Results of finished calls that are kept for a replacement, at most."""


class Session:
    """The calls of a script, and the models that it has compiled, by number."""

    def __init__(self) -> None:
        self.lockstep: Lockstep
        self._bindings: list[weakref.ref[Binding]] = []
        self._made = 0
        self._depth = 0
        self._results: dict[int, Any] = {}
        self._memories: dict[int, Any] = {}
        self._kept = 0
        self._under_way: Binding | None = None
        self._told: dict[str, Any] = {}
        self.whole = True
        """Whether a replacement could be told of all finished calls."""

    def register(self, binding: Binding) -> int:
        """The number of a model that was compiled under the strategy."""
        self._bindings.append(weakref.ref(binding))
        return len(self._bindings) - 1

    @property
    def call(self) -> int:
        """The number of the call under way, or of the next one."""
        return self._made

    @property
    def under_way(self) -> bool:
        """Whether a call is under way."""
        return self._depth > 0

    def key(self, kind: str, *numbers: int) -> Key:
        """The key of a unit of the call under way."""
        return (self._made, kind, self._depth, *numbers)

    # Calls

    def run(self, binding: Binding, call: Callable[[], Any]) -> Any:
        """Makes a call of the script. Its result is kept for those who come later."""
        outer, self._under_way = self._under_way, binding
        self._depth += 1
        try:
            result = call()
        finally:
            self._depth -= 1
            self._under_way = outer
        if self._depth == 0:
            self._keep(result)
            self._made += 1
        return result

    def _keep(self, result: Any) -> None:
        told = result
        if isinstance(result, keras.callbacks.History):
            told = {"history": result.history, "epoch": result.epoch, "params": result.params}
        try:
            size = sum(array.nbytes for array in encode(told).arrays)
        except NotSerializable:
            told, size = None, KEPT_BYTES + 1
        self._kept += size
        if self._kept > KEPT_BYTES:
            self.whole = False
        else:
            self._results[self._made] = told

    def keep_memory(self, memory: Any) -> None:
        """What the callbacks of the fit under way, which is over, remember: a script may ask them. What is
        too large to be kept is left out."""
        size = sum(array.nbytes for array in encode(memory).arrays)
        if self._depth == 1 and self._kept + size <= KEPT_BYTES:
            self._kept += size
            self._memories[self._made] = copy_value(memory)

    def recall_memory(self) -> Any:
        """What the callbacks of a finished fit remember."""
        return self._memories.get(self._made, {})

    def is_done(self) -> bool:
        """Whether the others have finished the call under way, so that `recall` has its result. Collective
        where the group hasn't been joined."""
        if self._depth != 1 or not self.lockstep.arriving:
            return False
        return self._made < int(self._told["call"])

    def recall(self, binding: Binding) -> Any:
        """The result of a finished call; its model gets the state that it has at the others'."""
        self._load(binding)
        told = self._results[self._made]
        if isinstance(told, dict) and told.keys() == {"history", "epoch", "params"}:
            history = keras.callbacks.History()
            history.set_model(binding.model)
            history.set_params(told["params"])
            history.history, history.epoch = told["history"], told["epoch"]
            binding.model.history = history
            return history
        return told

    def within(self) -> dict[str, Any] | None:
        """What the others said of the call under way, where this task is to enter it in its middle."""
        if self._depth != 1 or not self.lockstep.arriving or self._made != int(self._told["call"]):
            return None
        goal = self.lockstep.goal
        if goal is None or goal.key[1] == SETUP:
            return None
        told: dict[str, Any] = self._told["within"]
        return told

    # Carrier

    def give(self) -> Any:
        under_way = self._under_way
        states = {}
        for number, reference in enumerate(self._bindings):
            binding = reference()
            if binding is not None and binding.prepared:
                states[number] = views(binding.state)
        return {
            "call": self._made,
            "results": dict(self._results),
            "memories": dict(self._memories),
            "states": states,
            "within": under_way.give() if under_way is not None else {},
        }

    def receive(self, told: Any) -> None:
        self._told = told
        self._results = dict(told["results"])
        self._memories = dict(told["memories"])

    def arrive(self, key: Key) -> None:
        binding = self._under_way
        if binding is None or self._made != int(self._told["call"]):
            raise TrainingError(f"A replacement can't go on in the middle of {key[1]}. Start the job again.")
        for reference in self._bindings:
            other = reference()
            if other is not None and other.prepared:
                self._load(other, last=True)
        if key[1] != SETUP:
            binding.arrive(self._told["within"])
        self._told = {}

    def fingerprint(self) -> Fingerprint:
        binding = self._under_way
        if binding is None:
            return Fingerprint(())
        values = ((name, view(variable)) for name, variable in binding.state.named())
        return Fingerprint(values, (self._made, *binding.whereabouts))

    def _load(self, binding: Binding, *, last: bool = False) -> None:
        """`last`: nobody will load this state again."""
        state = self._told["states"].get(binding.number)
        if state is not None:
            load_snapshot(binding.state, state, donate=last)
