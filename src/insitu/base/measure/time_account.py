"""Accounts for the time of this process: how many seconds it has spent in each activity since it began.

A process is in one activity at a time, so the seconds add up to its age. One thread, the script's, says what
it does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from insitu.base.process.processes import identify_process
from insitu.base.progress import IDLE, LEAVING
from insitu.base.roster import CONNECTING, JOINING, RECOVERING

IMPORT = "import"
SCRIPT = "script"
COMPILE = "compile"
DATA = "data"
GRADIENT = "gradient"
EXCHANGE = "exchange"
WAIT = "wait"
UPDATE = "update"
CALLBACKS = "callbacks"
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
RECOVERY = "recovery"
ACTIVITIES = (
    IMPORT,
    SCRIPT,
    COMPILE,
    DATA,
    GRADIENT,
    EXCHANGE,
    WAIT,
    UPDATE,
    CALLBACKS,
    EVALUATION,
    CHECKPOINT,
    RECOVERY,
)
"""Activities of a task, in the order in which it begins them: it loads libraries; runs the script's own code;
compiles a step; waits for rows; computes gradients; moves them; waits for other tasks; updates the model;
runs callbacks and Keras' loop; evaluates; saves; recovers from a loss."""

_ACTIVITY_OF_PLACE = {
    "": SCRIPT,
    IDLE: SCRIPT,
    LEAVING: SCRIPT,
    CONNECTING: WAIT,
    "serving": WAIT,
    RECOVERING: RECOVERY,
    JOINING: RECOVERY,
    "gradient": GRADIENT,
    "step": GRADIENT,
    "custom loop": GRADIENT,
    "pull rows": EXCHANGE,
    "exchange": EXCHANGE,
    "push and pull": EXCHANGE,
    "update": UPDATE,
    "evaluation": EVALUATION,
}
"""By what a task reports as its place (`insitu.base.progress`)."""

_COMPILED = frozenset({"gradient", "step", "update"})
"""Places in which a function is compiled when it is called for the first time."""
_OVERRIDING = frozenset({WAIT, RECOVERY})
"""Activities that end whatever they come in the middle of."""
_WITH_WAITS = frozenset({EVALUATION, CHECKPOINT, WAIT, RECOVERY})
"""Activities that waits for other tasks, and what moves between them, are a part of."""

ReadWaits = Callable[[str], tuple[float, float]]
"""Given an activity that ends: returns the seconds in it that were waits for others, and those in which
numbers moved."""


class TimeAccount:
    """The seconds that a process has spent in each activity. Times are of the monotonic clock."""

    def __init__(self, now: float, started: float | None = None) -> None:
        #: Activities that others are part of until they end, the innermost last. Written by `hold`.
        self._held: list[str] = []
        #: Counts the waits in an activity that ends; None before there are others. Written by `split_waits`.
        self._read_waits: ReadWaits | None = None
        #: Places whose function is yet to be compiled. Written by `expect_compile`.
        self._uncompiled: set[str] = set()
        self._begin(now if started is None else started)

    def _begin(self, now: float) -> None:
        #: Seconds by activity, without those of the present one since it began.
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        #: The process's current activity.
        self._activity = IMPORT
        #: When it began to.
        self._since = now
        #: When the account begins.
        self._began = now

    def restart(self) -> None:
        """Begin the account now: what the process did before isn't a task's."""
        self._begin(time.monotonic())

    def enter(self, activity: str) -> None:
        """Count the time from now on to `activity`; to the one that is held, if there is one."""
        if self._held and activity not in _OVERRIDING:
            activity = self._held[-1]
        now = time.monotonic()
        spent = now - self._since
        if self._read_waits is not None:
            waited, moved = self._read_waits(self._activity)
            if self._activity not in _WITH_WAITS:
                # Waits belong to the activity that they interrupt, and to no other.
                waited = min(spent, waited)
                moved = min(spent - waited, moved)
                self._seconds[WAIT] += waited
                self._seconds[EXCHANGE] += moved
                spent -= waited + moved
        self._seconds[self._activity] += spent
        self._activity, self._since = activity, now

    def split_waits(self, read_waits: ReadWaits) -> None:
        """Count waits for others apart from the activities that they are in the middle of, from now on."""
        self.enter(self._activity)
        self._read_waits = read_waits

    def enter_place(self, place: str) -> None:
        """Count the time from now on to what a task does at a place that it reports."""
        if self._uncompiled and place in self._uncompiled:
            self._uncompiled.discard(place)
            self.enter(COMPILE)
        else:
            self.enter(_ACTIVITY_OF_PLACE.get(place, SCRIPT))

    def expect_compile(self) -> None:
        """Count the next call of each function of a step as its compilation."""
        self._uncompiled.update(_COMPILED)

    @contextlib.contextmanager
    def hold(self, activity: str) -> Iterator[None]:
        """Count all time while open to `activity`, but for waiting for others and recovering."""
        outer = self._activity
        self._held.append(activity)
        self.enter(activity)
        try:
            yield
        finally:
            self._held.pop()
            self.enter(outer)

    def move(self, source: str, target: str, seconds: float) -> float:
        """Count up to `seconds` of `source` to `target` instead. Returns how many there were."""
        moved = max(0.0, min(seconds, self._seconds[source]))
        self._seconds[source] -= moved
        self._seconds[target] += moved
        return moved

    def read(self) -> dict[str, float]:
        """Return the seconds by activity until now, without those that there are none of."""
        self.enter(self._activity)
        return {name: seconds for name, seconds in self._seconds.items() if seconds}

    @property
    def is_held(self) -> bool:
        """Whether all time is counted to one activity."""
        return bool(self._held)

    @property
    def activity(self) -> str:
        """The process's current activity."""
        return self._activity

    @property
    def age(self) -> float:
        """Seconds since the account began."""
        return time.monotonic() - self._began


def _read_age() -> float:
    """Return the seconds since this process was started; 0 if the system doesn't say it."""
    identity = identify_process(os.getpid())
    if identity is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - identity.start / os.sysconf("SC_CLK_TCK"))


def _make_account() -> TimeAccount:
    now = time.monotonic()
    return TimeAccount(now, now - _read_age())


def activity_of(place: str) -> str:
    """Return the activity of a task that reports this place."""
    return _ACTIVITY_OF_PLACE.get(place, SCRIPT)


ACCOUNT = _make_account()
"""That of this process. It begins with the process, by loading libraries."""
