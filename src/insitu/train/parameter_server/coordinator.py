"""`ClusterCoordinator`: a script schedules functions, and whichever worker is free runs them.

With `tf.distribute` the script runs in a chief alone, which sends traced functions to workers. Here nothing
that could be run is ever received: no function is sent, and nothing is unpickled. Each worker runs the whole
script instead, as in every job. So each has all functions under the same numbers, and is given a number to
run (`insitu.parameters.ClosureClient`). What a script may decide on must be the same in each worker:

- `schedule` only notes a function. Functions are run in `join`, `done` and `fetch`, which all workers call in
  the same order. That they scheduled the same functions is checked at each join.
- `fetch` returns the same value in each worker, or raises the same error.
- `join` waits for all workers. When it returns, all have the same weights, and the metrics have counted all
  functions. A function that failed is raised by the join behind it, in all workers; the other functions have
  been run.

A worker that dies takes nothing along but what it was doing: others run that. Its replacement runs the script
from its start. For it, functions that have ended are over, and `fetch` and `join` return what they returned
to the others; it gets the newest weights. It then takes part again. A function may have pushed its gradient
before its worker died, so its gradient may be applied twice, as with `tf.distribute`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import keras
import numpy as np

from insitu.context import Context
from insitu.errors import InputError, ServerLost, ServerMoved, ServerStalled, TrainingError
from insitu.parameters import ClosureClient
from insitu.train.parameter_server.closures import (
    Closure,
    PerWorkerDataset,
    PerWorkerValues,
    RemoteValue,
    current_worker,
    decode_result,
    describe_closures,
    encode_failure,
    encode_result,
    rebuild_failure,
    refuse_remote_values,
    worker_scope,
)
from insitu.train.parameter_server.server_marks import ServerMarks
from insitu.train.parameter_server.summed_variables import SummedVariables

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
PerWorkerValue = PerWorkerValues
"""The name that `tf.distribute.coordinator` has for it."""
_LOG = logging.getLogger("insitu")
_POLL_INTERVAL = 0.01
"""Seconds between two questions for a function to run, where there is none."""
_SERVER_ERRORS = (ServerLost, ServerMoved, ServerStalled)
"""Errors that aren't the function's."""


class CoordinatedStrategy(Protocol):
    """What a coordinator uses of its strategy."""

    def coordinate(self) -> tuple[ClosureClient, ServerMarks, Context]:
        """Prepare for functions that one worker runs at a time. Raises TrainingError where it can't be."""

    def run_closure(self, call: Callable[[], Any], *, trial: bool) -> Any:
        """Return what `call` returns, which may use `run` and `reduce` for this worker alone. In a trial
        nothing is pushed."""

    def follow_generation(self) -> None:
        """Notice changes of the job. Called repeatedly while this worker waits."""

    def summed_variables(self) -> list[Any]:
        """Return the variables that are summed over workers, in the order of their creation."""

    def pull_weights(self) -> None:
        """Take over the servers' weights."""

    def make_worker_dataset(self, make: Callable[[], Any]) -> Any:
        """Return the data that `make` returns, as this worker is to read it."""


class ClusterCoordinator:
    """Runs functions on the workers of a `ParameterServerStrategy` in mode async; see the module.

    There is one for each strategy: making it again returns the same.
    """

    def __new__(cls, strategy: Any) -> ClusterCoordinator:
        known: ClusterCoordinator | None = getattr(strategy, "_coordinator", None)
        if known is None:
            known = super().__new__(cls)
            known._prepare(strategy)
            strategy._coordinator = known
        return known

    def __init__(self, strategy: Any) -> None:
        del strategy  # see `__new__`

    def _prepare(self, strategy: CoordinatedStrategy) -> None:
        if not hasattr(strategy, "coordinate"):
            raise InputError(
                "A ClusterCoordinator needs an insitu.ParameterServerStrategy. Received: "
                f"{type(strategy).__name__}."
            )
        self._strategy = strategy
        self._client, self._marks, self._context = strategy.coordinate()
        #: Functions by their number less `_first`: those that were scheduled since the last join.
        self._closures: list[Closure] = []
        #: Number of the first of `_closures`.
        self._first = 0
        #: Joins so far.
        self._joins = 0
        #: The code of the functions that this worker has tried.
        self._tried: set[Any] = set()
        self._summed = SummedVariables()
        #: Errors of functions that this worker has run, by number.
        self._errors: dict[int, Exception] = {}

    @property
    def strategy(self) -> Any:
        """The strategy whose workers run the functions."""
        return self._strategy

    def schedule(self, fn: Callable[..., Any], args: Any = None, kwargs: Any = None) -> RemoteValue:
        """Have one worker run `fn(*args, **kwargs)`. Returns at once: see `join` and `RemoteValue.fetch`.

        For a `PerWorkerValues` argument `fn` gets the value of the worker that runs it.
        """
        if not callable(fn):
            raise InputError(f"schedule takes a function. Received: {fn!r}.")
        refuse_remote_values((args, kwargs))
        self._closures.append(Closure(fn, tuple(args or ()), dict(kwargs or {})))
        return RemoteValue(self._fetch, self._first + len(self._closures) - 1)

    def join(self) -> None:
        """Run all scheduled functions, with the other workers. All workers call it. Afterwards each has the
        servers' weights, and metrics that count all functions. Raises what a function raised."""
        limit, number = self._first + len(self._closures), self._joins
        self._run_until(lambda: False)
        record = self._client.join(number, limit, describe_closures(self._closures))
        self._marks.meet(2 * number, self._context.shards, self._strategy.follow_generation)
        self._strategy.pull_weights()
        self._summed.load(record.sums)
        self._marks.meet(2 * number + 1, self._context.shards, self._strategy.follow_generation)
        error = None if record.failed < 0 else self._find_error(record.failed)
        self._joins, self._first, self._closures = number + 1, limit, []
        self._errors.clear()
        if error is not None:
            raise error

    def done(self) -> bool:
        """Run all scheduled functions as `join` does, and return True. Workers run them in calls such as this
        one alone, so there is no other answer."""
        self.join()
        return True

    def fetch(self, val: Any) -> Any:
        """Return `val`, a structure, with the results of RemoteValues in place of them."""
        return keras.tree.map_structure(lambda v: v.fetch() if isinstance(v, RemoteValue) else v, val)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Return the data of each worker: a dataset, or a function that returns one. All workers may read the
        same rows; their shuffles differ, unless the script has set a seed."""
        fn = getattr(dataset_fn, "python_function", dataset_fn)
        is_data = not callable(fn) or hasattr(fn, "__iter__")
        return PerWorkerDataset(self._strategy.make_worker_dataset((lambda: fn) if is_data else fn))

    # Running functions

    def _fetch(self, number: int) -> Any:
        found = self._client.result(number)
        if found is None:
            self._run_until(lambda: self._client.result(number) is not None)
            found = self._client.result(number)
        if found is None:
            raise TrainingError(
                f"A function ends before the join behind it. Received: no end of number {number}."
            )
        data, failed = found
        if failed:
            raise self._find_error(number)
        return decode_result(data)

    def _find_error(self, number: int) -> Exception:
        found = self._errors.get(number) or self._client.result(number)
        if isinstance(found, Exception):
            return found
        index = number - self._first
        known = 0 <= index < len(self._closures)
        name = self._closures[index].name if known else f"function {number}"
        return rebuild_failure(found[0] if found is not None else b"", name)

    def _run_until(self, is_enough: Callable[[], bool]) -> None:
        """Run functions until all have ended, or `is_enough`."""
        limit = self._first + len(self._closures)
        self._summed.begin(self._strategy.summed_variables())
        self._try_new_functions()
        deadline = time.monotonic() + self._context.stall_timeout
        while not is_enough():
            number = self._client.take(limit)
            if number is None:
                break
            if number >= 0:
                self._run(number)
                deadline = time.monotonic() + self._context.stall_timeout
                continue
            self._strategy.follow_generation()
            if time.monotonic() >= deadline:
                raise ServerStalled(
                    "Scheduled functions that other workers run must end within "
                    f"{self._context.stall_timeout:g} s. Received: no end. Read the logs of the workers, or "
                    "raise --stall-timeout."
                )
            time.sleep(_POLL_INTERVAL)
        self._summed.end()

    def _try_new_functions(self) -> None:
        """Run each function that is new once without effect, where there are several workers.

        So each worker knows which variables the servers have, also one that comes to run nothing. And the
        chief, whose first values count, doesn't leave the others waiting for them.
        """
        for closure in self._closures if len(self._context.workers) > 1 else ():
            if closure.code in self._tried:
                continue
            self._tried.add(closure.code)
            before = self._summed.read(self._strategy.summed_variables())
            iterators = closure.iterators()
            for iterator in iterators:
                iterator.begin_trial()
            try:
                self._call(closure, trial=True)
            except _SERVER_ERRORS:
                raise
            except Exception:
                _LOG.debug("A trial of %s failed; its run will tell.", closure.name, exc_info=True)
            finally:
                for iterator in iterators:
                    iterator.end_trial()
                self._summed.assign(before)

    def _call(self, closure: Closure, *, trial: bool) -> Any:
        with worker_scope(self._context.index):
            return self._strategy.run_closure(closure.run, trial=trial)

    def _run(self, number: int) -> None:
        """Run a function, and tell what came of it."""
        closure = self._closures[number - self._first]
        before = self._summed.read(self._strategy.summed_variables())
        try:
            result = encode_result(closure, self._call(closure, trial=False))
        except _SERVER_ERRORS:
            raise
        except Exception as error:
            self._errors[number] = error
            failure = encode_failure(error, self._context.index)
            self._client.finish(number, failure, np.zeros(0), failed=True)
            return
        after = self._summed.read(self._strategy.summed_variables())
        before = np.concatenate([before, self._summed.first_values(before.size)])
        self._client.finish(number, result, after - before)


def experimental_get_current_worker_index() -> int:
    """Return the index of the worker that runs the scheduled function. Raises TrainingError elsewhere."""
    index = current_worker()
    if index is None:
        raise TrainingError(
            "The current worker is that of a scheduled function. Received: a call outside of one. Call it in "
            "a function that is passed to ClusterCoordinator.schedule."
        )
    return index
