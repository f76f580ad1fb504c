"""Marks that the servers keep, whichever task restarts: which fits have started and ended, which tables have
their saved rows, which data workers were given."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import ServerStalled
from insitu.parameters import Client, Table
from insitu.parameters.rules import stable_hash
from insitu.train.replica import find_vocabularies, refuse_vocabularies

MARKS = Table("insitu/ends of fits", 1, initializer={"name": "constant", "value": 0.0})
"""Row (fit, shard) is 1 once the shard has ended the fit; row (fit, number of shards) once the variables are
finalized; row (fit, number of shards + 1) once the chief has started the fit. A negative key, one for each
table, is 1 once the table has its saved rows."""
DATA = Table("insitu/data of fits", 1, "float64", initializer={"name": "constant", "value": 0.0})
"""Row (fit, place in it, shard) is the fingerprint of what the shard's worker was given up to there."""
_FIRST_MEETING = 1 << 30
"""Meetings are counted from here as fits are from 0."""
_POLL_INTERVAL = 0.02
"""Seconds between two looks at a mark that isn't set yet."""


class ServerMarks:
    """Sets marks and waits for them. Waits raise ServerStalled after `timeout` seconds without an update."""

    def __init__(self, client: Client, shards: int, timeout: float) -> None:
        self._client = client
        self._shards = shards
        self._timeout = timeout
        self._is_defined = False

    # Fits

    def set_started(self, fit: int) -> None:
        self._set(_fit_keys(fit, [self._shards + 1]))

    def is_started(self, fit: int) -> bool:
        return bool(self._read(_fit_keys(fit, [self._shards + 1])).all())

    def wait_for_start(self, fit: int, waiting: Callable[[], None]) -> None:
        """Wait until the chief has started the fit. `waiting` is called repeatedly."""
        self._wait(
            _fit_keys(fit, [self._shards + 1]),
            lambda _: (
                "The chief must start a fit within {limit} of the others. Received: no start from the "
                "chief. Read its log"
            ),
            waiting,
        )

    def set_ends(self, fit: int, shards: Sequence[int]) -> None:
        self._set(_fit_keys(fit, shards))

    def wait_for_ends(self, fit: int, waiting: Callable[[], None]) -> None:
        """Wait until all shards have ended the fit. `waiting` is called repeatedly."""
        self._wait(
            _fit_keys(fit, range(self._shards)),
            lambda missing: (
                "All shards must end a fit within {limit} of the last update. Received: no end from "
                f"shards {missing}. Read the logs of their workers"
            ),
            waiting,
        )

    def set_finalized(self, fit: int) -> None:
        self._set(_fit_keys(fit, [self._shards]))

    def wait_for_finalized(self, fit: int, waiting: Callable[[], None]) -> None:
        """Wait until the chief has had the variables finalized. `waiting` is called repeatedly."""
        self._wait(
            _fit_keys(fit, [self._shards]),
            lambda _: (
                "The chief must finalize the variables within {limit} of a fit's end. Received: "
                "nothing from the chief. Read its log"
            ),
            waiting,
        )

    # Meetings

    def meet(self, number: int, shards: Sequence[int], waiting: Callable[[], None]) -> None:
        """Wait until all shards have come to meeting `number`. `waiting` is called repeatedly."""
        meeting = _FIRST_MEETING + number
        self._set(_fit_keys(meeting, shards))
        self._wait(
            _fit_keys(meeting, range(self._shards)),
            lambda missing: (
                "All workers must come to a join within {limit} of each other. Received: nothing "
                f"from shards {missing}. Read the logs of their workers"
            ),
            waiting,
        )

    # Tables

    def set_table_begun(self, table: str) -> None:
        self._set(_table_key(table))

    def is_table_begun(self, table: str) -> bool:
        return bool(self._read(_table_key(table)).all())

    def wait_for_table(self, table: str) -> None:
        """Wait until the chief has loaded the saved rows of a table."""
        self._wait(
            _table_key(table),
            lambda _: (
                f"The chief must load the saved rows of table {table!r} within {{limit}}. Received: no "
                "rows. Read the log of worker:0"
            ),
            lambda: None,
        )

    # Data

    def set_data(self, fit: int, place: str, shards: Sequence[int], fingerprint: int) -> None:
        """Keep the fingerprint of the data that the worker of `shards` was given up to a place of a fit."""
        self._define()
        rows = np.full((len(shards), 1), fingerprint, np.float64)
        self._client.load_rows(DATA.name, _data_keys(fit, place, shards), rows).result()

    def read_data(self, fit: int, place: str) -> list[int]:
        """Return the fingerprint of each shard; 0 of those that haven't come to that place."""
        self._define()
        keys = _data_keys(fit, place, range(self._shards))
        rows: NDArray[Any] = self._client.pull_rows(DATA.name, keys, create=False).result()
        return [int(number) for number in rows[:, 0].tolist()]

    # Numbers

    @property
    def version(self) -> int:
        """Updates that the values had which this worker pulled last."""
        return self._client.version

    def set_number(self, name: str, fit: int, number: int) -> None:
        """Keep a number of a fit, by a name: a whole one, above 0."""
        self._define()
        rows = np.full((1, 1), number, np.float64)
        self._client.load_rows(DATA.name, _data_keys(fit, name, [0]), rows).result()

    def read_number(self, name: str, fit: int) -> int:
        """Return a number of a fit; 0 if nobody has set it."""
        self._define()
        rows: NDArray[Any] = self._client.pull_rows(
            DATA.name, _data_keys(fit, name, [0]), create=False
        ).result()
        return int(rows[0, 0])

    def _set(self, keys: NDArray[np.int64]) -> None:
        self._define()
        self._client.load_rows(MARKS.name, keys, np.ones((len(keys), 1), np.float32)).result()

    def _read(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        self._define()
        rows: NDArray[Any] = self._client.pull_rows(MARKS.name, keys, create=False).result()
        marked: NDArray[np.bool_] = rows[:, 0] > 0
        return marked

    def _define(self) -> None:
        if not self._is_defined:
            self._client.define_tables([MARKS, DATA])
            self._is_defined = True

    def _wait(
        self, keys: NDArray[np.int64], explain: Callable[[list[int]], str], waiting: Callable[[], None]
    ) -> None:
        deadline, seen = time.monotonic() + self._timeout, self._client.tables.row_versions
        while not (marked := self._read(keys)).all():
            if self._client.tables.row_versions != seen:
                # A worker that comes late continues with its own steps.
                deadline, seen = time.monotonic() + self._timeout, self._client.tables.row_versions
            if time.monotonic() >= deadline:
                limit = f"{self._timeout:g} s"
                rule = explain(np.flatnonzero(~marked).tolist()).replace("{limit}", limit)
                raise ServerStalled(f"{rule}, or raise --stall-timeout.")
            waiting()
            time.sleep(_POLL_INTERVAL)


def _fit_keys(fit: int, shards: Sequence[int]) -> NDArray[np.int64]:
    return np.array([(fit << 32) + shard for shard in shards], np.int64)


def _data_keys(fit: int, place: str, shards: Sequence[int]) -> NDArray[np.int64]:
    return np.array([stable_hash("data", fit, place, shard) // 2 for shard in shards], np.int64)


def _table_key(table: str) -> NDArray[np.int64]:
    return np.array([-1 - stable_hash("begun", table) // 4], np.int64)


# Compare, over the servers, the vocabularies that the workers look words up in.
#
# Workers on servers don't meet. Each writes what it has before it reads what others have written, so of two
# that differ at least the one that comes later finds it, before its first gradient


_FIT = 0
"""Number for data of all fits, under the names of vocabularies, which no place in a fit has."""
_LARGEST = 1 << 52
"""Above all fingerprints: what a float64 holds."""


def check_vocabularies(marks: ServerMarks, shards: Sequence[int], model: Any = None) -> None:
    """Raise TrainingError if `model`, or a file that this task has read, has another vocabulary than that
    of the same name in another task. `shards` are those of this task."""
    different, others = [], set()
    for name, digest in sorted(find_vocabularies(model).items()):
        place, own = f"vocabulary: {name}", int(digest, 16) % _LARGEST or 1
        marks.set_data(_FIT, place, shards, own)
        strange = [s for s, known in enumerate(marks.read_data(_FIT, place)) if known not in (0, own)]
        if strange:
            different.append(name)
            others.update(strange)
    if different:
        where = ", ".join(map(str, sorted(others)))
        refuse_vocabularies(
            different, f"the workers of shards {where} have another one than that of shard {shards[0]}"
        )


# Counts the updates that servers make of all workers' gradients, and ends a fit for all workers by them.
#
# A worker learns with each pull how many updates there were. If the chief ends a training before the planned
# number, it leaves a lower one with the servers, and the others look there


FIRST, LIMIT = "first update", "last update"
"""Names of the numbers that the servers keep for a fit."""
_LOOK_INTERVAL = 0.5
"""Seconds between two looks for a lower limit, if steps needn't end together."""


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The end of a fit, and the start of its count of updates."""

    #: The number of updates with which the fit ends for all workers; None: it is left to epochs.
    limit: int | None = None
    #: The updates that the chief's weights have had before the servers got them: in an earlier job.
    first: int = 0
    #: Whether workers look for the chief's lower limit behind each step, and so end at the same one.
    asks_each_step: bool = False


class UpdateCount:
    """The updates of the model on the servers, as this worker knows them."""

    def __init__(self, marks: ServerMarks, now: Callable[[], float] = time.monotonic) -> None:
        self._marks = marks
        self._now = now
        #: The updates before those that the servers count.
        self._first = 0
        #: The fit under way, and its plan. Written by `begin`.
        self._fit, self._plan = 0, UpdatePlan()
        #: The number of updates that ends the fit; None: none does. Written by `begin`, `end_at` and looks.
        self._limit: int | None = None
        #: When to look next for the chief's limit, in seconds of the clock.
        self._next_look = 0.0

    @property
    def count(self) -> int:
        """The updates that the weights have had which this worker pulled last."""
        return self._first + self._marks.version

    def offer_first(self, fit: int, first: int) -> None:
        """Have the updates before the servers' own counted, unless the fit has been started. For the chief,
        before it starts the fit."""
        if first and not self._marks.is_started(fit):
            self._marks.set_number(FIRST, 0, first)

    def begin(self, fit: int, plan: UpdatePlan) -> None:
        """Begin a fit that was started, or resume it."""
        self._fit, self._plan, self._limit = fit, plan, plan.limit
        self._first = self._marks.read_number(FIRST, 0)
        self._look()

    def _look(self) -> None:
        """Take over the chief's limit."""
        self._next_look = self._now() + _LOOK_INTERVAL
        found = self._marks.read_number(LIMIT, self._fit)
        if found:
            self._limit = found if self._limit is None else min(found, self._limit)

    @property
    def is_at_limit(self) -> bool:
        """Whether the updates that are known here have reached the limit that is known here."""
        return self._limit is not None and self.count >= self._limit

    def is_over(self) -> bool:
        """Return whether the fit ends for this worker now. Called behind each of its steps."""
        if not self.is_at_limit and (self._plan.asks_each_step or self._now() >= self._next_look):
            self._look()
        return self.is_at_limit

    def end_at(self, limit: int) -> None:
        """Have the fit end for all workers with this number of updates. For the chief."""
        limit = max(1, limit)
        self._marks.set_number(LIMIT, self._fit, limit)
        self._limit = limit if self._limit is None else min(limit, self._limit)
