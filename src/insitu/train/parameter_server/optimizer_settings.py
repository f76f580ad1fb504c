"""Keep a worker's optimizer and the servers' at the same learning rate, and refuse other changes.

A script or a callback may set `optimizer.learning_rate` at any time. The chief's value counts: it is sent to
the servers before the chief's next push. Each worker, also the chief, takes over what the servers have with
its next pull, so that its history and its other callbacks see the learning rate that is in force.

Other settings (momentum, weight decay, clipping) are part of the update that the servers have made from the
optimizer. Keras itself ignores a later change once its step is compiled; here the change is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.parameters import FinalizingUpdater, InitialisingUpdater, Updater
from insitu.train.parameter_server.model_spec import (
    STATE_PREFIX,
    can_be_split,
    clip_norms_of,
    needs_one_server,
    to_float,
    updater_config,
)
from insitu.train.replica import inner_optimizer

_PLAIN = (int, float, bool, str, type(None))


class OptimizerSettings:
    """The settings of one optimizer that is None in a step without training.

    `tables` are the names of the tables that the servers update by the same optimizer. With `any_worker` all
    send what they set: they run the same script in step, so it is the same. `members` are the optimizers of a
    MultiOptimizer, whose learning rates stay as they are too.
    """

    def __init__(
        self,
        optimizer: Any,
        client: Any,
        tables: Sequence[str] = (),
        *,
        dense: bool = True,
        any_worker: bool = False,
        members: Sequence[Any] = (),
    ) -> None:
        self._optimizer = inner_optimizer(optimizer)
        self._client = client
        self._members = members
        self._sends = any_worker or client.is_chief
        self._tables = [*([""] if dense else []), *tables]
        #: The learning rate's variable, or a schedule; None without an optimizer.
        self._rate: Any = None if optimizer is None else self._optimizer._learning_rate
        #: The settings that may not change, by attribute.
        self._fixed = self._read_fixed()
        #: The learning rate that the servers have, as far as this worker knows. Written by `send`, `receive`.
        self._known = self._read_rate()
        #: The version of the last pull; None if the optimizer has it. Written by `receive`, `show_updates`.
        self._version: int | None = None
        #: Whether what was set since the last pull doesn't count. Written by `resume` and `send`.
        self._resumes = False

    def _read_fixed(self) -> dict[str, Any]:
        if self._optimizer is None:
            return {}
        found = _read_plain(self._optimizer)
        for number, member in enumerate(self._members):
            prefix = f"optimizers[{number}]."
            found.update({prefix + name: value for name, value in _read_plain(member).items()})
            if isinstance(member._learning_rate, keras.Variable):
                found[f"{prefix}learning_rate"] = to_float(member._learning_rate)
        return found

    def _read_rate(self) -> float | None:
        return to_float(self._rate) if isinstance(self._rate, keras.Variable) else None

    @property
    def rate_variable(self) -> Any:
        """The variable of the learning rate; None for a schedule, or without an optimizer."""
        return self._rate if isinstance(self._rate, keras.Variable) else None

    def send(self, rate: float | None = None) -> None:
        """Send the servers the chief's learning rate, if it has changed. Called before each push. `rate` is
        the variable's value if it was just read.

        Raises TrainingError if another setting has changed.
        """
        if self._optimizer is None or not self._tables:
            return
        self._check_fixed()
        if self._resumes and self._known is not None:
            self._rate.assign(self._known)
            rate = None
        self._resumes = False
        rate = self._read_rate() if rate is None else rate
        if rate is None or rate == self._known:
            return
        if self._sends:
            self._client.set_learning_rates(dict.fromkeys(self._tables, rate)).result()
        self._known = rate

    def resume(self) -> None:
        """Begin in the middle of an epoch: callbacks repeat what they did at its beginning, and the servers
        know it already. The next push keeps their learning rate."""
        self._resumes = True

    def receive(self, version: int, *, is_sent: bool = False, enters: bool = False) -> None:
        """Take over the learning rate that the servers have at `version`. Called behind each pull.

        The chief keeps what was set and isn't sent yet, unless it `enters` a fit that an earlier process of
        its task has started.

        The optimizer's count of updates becomes `version`. In a step that is no common one, and without a
        schedule, nobody goes by it until `show_updates`, and it would cost a call into the backend, too.

        `is_sent`: `send` came before the pull, and no code of the user in between. Then the variable, which
        costs a call into the backend, isn't read a second time.
        """
        self._version = version
        is_scheduled = isinstance(self._rate, keras.optimizers.schedules.LearningRateSchedule)
        if self._optimizer is not None and (not is_sent or is_scheduled or self._client.mode == "sync"):
            self.show_updates()
        rate = self._client.learning_rates.get(self._tables[0]) if self._tables else None
        if rate is None or self._known is None:
            return
        own = self._known if is_sent else self._read_rate()
        if rate == own or (self._sends and own != self._known and not (enters or self._resumes)):
            return
        self._rate.assign(rate)
        self._known = self._read_rate()

    def show_updates(self) -> None:
        """Have the optimizer here count the updates of the servers, as of the last pull. Called before
        callbacks are."""
        if self._optimizer is not None and self._version is not None:
            self._optimizer._iterations.assign(self._version)
            self._version = None

    def _check_fixed(self) -> None:
        optimizer, now = self._optimizer, self._read_fixed()
        if optimizer._learning_rate is not self._rate:
            received = f"learning_rate = {type(optimizer._learning_rate).__name__}"
        elif now != self._fixed:
            name = next(n for n in {**now, **self._fixed} if now.get(n) != self._fixed.get(n))
            received = f"{name} = {now.get(name)!r} instead of {self._fixed.get(name)!r}"
        else:
            return
        later = "Only a number for learning_rate may be set later"
        if self._members:
            later = "With several optimizers nothing may be set later"
        raise TrainingError(
            "On parameter servers an optimizer keeps the settings that it had when training began: the "
            f"servers have made their update from them. Received: {type(optimizer).__name__}.{received}. "
            f"Set it before the first fit. {later}."
        )


def _read_plain(optimizer: Any) -> dict[str, Any]:
    """Return the settings of an optimizer that are plain values."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if type(value) in _PLAIN and not name.startswith("_") and name != "built"
    }


# Updates of a model's variables by servers: by one optimizer, or by several, each for its own variables
# (`keras.optimizers.MultiOptimizer`)


Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ServerUpdate:
    """How servers update variables."""

    #: The configuration of the updater, as plain values.
    config: dict[str, Any]
    #: Whether parts of a variable may be updated apart.
    can_be_split: bool
    #: Whether one server must have all variables.
    together: bool
    #: Whether the variables' last values are averages.
    finalizes: bool
    #: The optimizers of a MultiOptimizer; empty for any other.
    members: tuple[Any, ...] = ()


def describe_update(optimizer: Any, variables: Mapping[str, Any], *, exact: bool, jit: bool) -> ServerUpdate:
    """Return how servers update `variables`, by name, as `optimizer` would. See `updater_config`.

    Norms that a member of a MultiOptimizer bounds are those of its own variables, so the servers bound them,
    also if a worker does otherwise.
    """
    if not has_several(optimizer):
        return ServerUpdate(
            updater_config(optimizer, exact=exact, jit=jit),
            can_be_split(optimizer),
            needs_one_server(optimizer, exact=exact),
            bool(optimizer.use_ema),
        )
    chosen = {
        name: optimizer._optimizer_map(variable)
        for name, variable in variables.items()
        if not name.startswith(STATE_PREFIX)
    }
    members = list({id(member): member for member in chosen.values()}.values())
    numbers = {id(member): number for number, member in enumerate(members)}
    several = [
        updater_config(member, exact=exact or bool(clip_norms_of(member)), jit=jit) for member in members
    ]
    config = {
        "state": "assign" if exact else "average",
        "several": several,
        "of": {name: numbers[id(member)] for name, member in chosen.items()},
    }
    together = any(needs_one_server(member, exact=True) for member in members)
    finalizes = any(member.use_ema for member in members)
    return ServerUpdate(config, False, together, finalizes, tuple(members))


def has_several(optimizer: Any) -> bool:
    """Return whether an optimizer leaves each variable to one of several."""
    kind = getattr(keras.optimizers, "MultiOptimizer", None)  # Keras has it since 3.13
    return kind is not None and isinstance(optimizer, kind)


class SeveralUpdaters:
    """Leaves each variable to one of several updaters: `of` has its number by the variable's name."""

    elementwise = False

    def __init__(self, updaters: Sequence[Updater], of: Mapping[str, int]) -> None:
        self._updaters = updaters
        self._of = of

    def slots(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        return self._updaters[self._of[name]].slots(name, shape, dtype)

    def row_slots(self) -> dict[str, float]:
        raise NotImplementedError("Rows of tables have updaters of their own.")

    def update(self, values: Arrays, gradients: Arrays, slots: Mapping[str, Arrays], step: int) -> None:
        for updater, own in self._divide(values):
            updater.update(own, gradients, slots, step)

    def initialise(self, values: Arrays, slots: Mapping[str, Arrays]) -> None:
        for updater, own in self._divide(values):
            if isinstance(updater, InitialisingUpdater):
                updater.initialise(own, slots)

    def finalize(self, values: Arrays, slots: Mapping[str, Arrays]) -> None:
        for updater, own in self._divide(values):
            if isinstance(updater, FinalizingUpdater):
                updater.finalize(own, slots)

    def _divide(self, values: Arrays) -> list[tuple[Updater, Arrays]]:
        """Return each updater that has variables here, with them."""
        parts: dict[int, dict[str, NDArray[Any]]] = {}
        for name, value in values.items():
            parts.setdefault(self._of[name], {})[name] = value
        return [(self._updaters[number], own) for number, own in sorted(parts.items())]

    def update_rows(self, values: NDArray[Any], gradients: NDArray[Any], slots: Arrays, step: int) -> None:
        raise NotImplementedError("Rows of tables have updaters of their own.")
