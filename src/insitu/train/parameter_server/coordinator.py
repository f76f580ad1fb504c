"""`ClusterCoordinator`: a script schedules functions, and whichever worker is free runs them.

With `tf.distribute` the script runs in a chief alone, which sends traced functions to workers. Here nothing
that could be run is ever received: no function is sent, and nothing is unpickled. Each worker runs the whole
script instead, as in every job. So each has all functions under the same numbers, and is given a number to
run (`insitu.parameters.ClosureClient`). Values on which a script may decide must be the same in each worker:

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

Example:
    >>> coordinator = insitu.coordinator.ClusterCoordinator(strategy)  # doctest: +SKIP
    >>> losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(100)]  # doctest: +SKIP
    >>> coordinator.join()  # doctest: +SKIP
    >>> coordinator.fetch(losses[-1])  # doctest: +SKIP
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np
from keras.src.backend.common.variables import Variable
from numpy.typing import NDArray

from insitu.base import errors
from insitu.base.context import Context
from insitu.base.errors import InputError, ServerLost, ServerMoved, ServerStalled, TrainingError
from insitu.base.serialization import NotSerializable, from_bytes, to_bytes
from insitu.parameters import ClosureClient
from insitu.train.backends import active_backend
from insitu.train.parameter_server.server_marks import ServerMarks
from insitu.train.replica import to_numpy

# Functions that a coordinator schedules, their arguments of each worker, and what comes of them


class PerWorkerValues:
    """A value that each worker has its own of. A scheduled function gets that of the worker that runs it.

    A process holds only its own.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __next__(self) -> Any:
        """Raise TrainingError: only a function on a worker reads its data."""
        raise TrainingError(
            "Data of each worker are read in scheduled functions. Received: next() of the iterators of all "
            "workers. Pass the iterator to ClusterCoordinator.schedule, and call next() in the function."
        )


class WorkerIterator:
    """Iterates over a worker's data, and can take back what was read: a trial run uses up no row."""

    def __init__(self, items: Iterator[Any], element_spec: Any = None) -> None:
        self._items = items
        #: Items that were read in a trial run; None while there is none.
        self._read: list[Any] | None = None
        #: Shapes and dtypes of an item, if the data knows them.
        self.element_spec = element_spec

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        active_backend().leave_graph("The iterator of a per-worker dataset")
        item = next(self._items)
        if self._read is not None:
            self._read.append(item)
        return item

    def get_next(self) -> Any:
        """Return the next item. Raises `tf.errors.OutOfRangeError` at the end on TensorFlow, StopIteration on
        other backends."""
        try:
            return next(self)
        except StopIteration:
            raise active_backend().out_of_range_error() from None

    def begin_trial(self) -> None:
        """Remember what is read from now on."""
        self._read = []

    def end_trial(self) -> None:
        """Take back what was read since the trial began."""
        read, self._read = self._read or [], None
        self._items = itertools.chain(read, self._items)


class PerWorkerDataset:
    """The data of each worker. `iter` makes an iterator on each, to be passed to `schedule`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of an item, if the data knows them."""
        return getattr(self._dataset, "element_spec", None)

    def __iter__(self) -> PerWorkerValues:
        return PerWorkerValues(WorkerIterator(iter(self._dataset), self.element_spec))


@dataclass(frozen=True, slots=True)
class Closure:
    """A scheduled function and its arguments."""

    #: The function, as it was passed to `schedule`.
    fn: Callable[..., Any]
    #: Its positional arguments.
    args: tuple[Any, ...]
    #: Its arguments by name.
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        fn = getattr(self.fn, "python_function", self.fn)
        return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__name__)}"

    @property
    def code(self) -> Any:
        """Equal for functions of the same code."""
        fn = getattr(self.fn, "python_function", self.fn)
        return getattr(fn, "__code__", fn)

    def iterators(self) -> list[WorkerIterator]:
        """Return the iterators of this worker among the arguments."""
        leaves = keras.tree.flatten((self.args, dict(self.kwargs)))
        values = [leaf.value for leaf in leaves if isinstance(leaf, PerWorkerValues)]
        return [value for value in values if isinstance(value, WorkerIterator)]

    def run(self) -> Any:
        """Call the function with this worker's values. Returns its result as NumPy arrays."""

        def resolve(leaf: Any) -> Any:
            return leaf.value if isinstance(leaf, PerWorkerValues) else leaf

        args, kwargs = keras.tree.map_structure(resolve, (self.args, dict(self.kwargs)))
        try:
            returned = self.fn(*args, **kwargs)
        except StopIteration:
            raise active_backend().out_of_range_error() from None
        return keras.tree.map_structure(_to_plain, returned)


_workers: list[int] = []


@contextlib.contextmanager
def worker_scope(index: int) -> Iterator[None]:
    """While open, a scheduled function runs on the worker of this index."""
    _workers.append(index)
    try:
        yield
    finally:
        _workers.pop()


def current_worker() -> int | None:
    """Return the index of the worker that runs a scheduled function; None outside of one."""
    return _workers[-1] if _workers else None


def describe_closures(closures: Sequence[Closure]) -> str:
    """Return 16 hex digits, equal for the same functions in the same order."""
    digest = hashlib.sha256()
    for closure in closures:
        digest.update(closure.name.encode() + b"\n")
    return digest.hexdigest()[:16]


def _to_plain(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, bool | int | float | str | bytes | np.ndarray | np.generic):
        return leaf
    return np.asarray(keras.ops.convert_to_numpy(leaf)) if hasattr(leaf, "dtype") else leaf


def encode_result(closure: Closure, result: Any) -> bytes:
    """Return the bytes of a result. Raises TrainingError for one that can't be sent."""
    try:
        return to_bytes(result)
    except NotSerializable as error:
        raise TrainingError(
            "A scheduled function returns tensors, arrays, numbers, text, or lists, tuples and dicts of "
            f"them, since every worker gets it. Received: {type(result).__name__} from {closure.name} "
            f"({error}). Return what is needed of it as arrays."
        ) from None


def decode_result(data: bytes) -> Any:
    """Return the value of `encode_result`."""
    return from_bytes(data)


def encode_failure(error: Exception, worker: int) -> bytes:
    """Return the bytes that describe an error to other workers."""
    kind = type(error)
    return to_bytes(
        {"module": kind.__module__, "name": kind.__qualname__, "text": str(error), "worker": worker}
    )


def rebuild_failure(data: bytes, name: str) -> Exception:
    """Return an error like that of `encode_failure`: of the same type, if that is one of Python's,
    TensorFlow's or insitu's, so that all workers handle it alike. Others become TrainingErrors."""
    described = from_bytes(data)
    text = f"{described['text']} (in {name}, on worker:{described['worker']})"
    module, kind = described["module"], described["name"]
    if module == "builtins":
        found = getattr(builtins, kind, None)
    elif module == "insitu.base.errors":
        found = getattr(errors, kind, None)
    elif module.startswith("tensorflow."):
        return _rebuild_tensorflow_error(kind, text)
    else:
        found = None
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(text)
        except TypeError:  # one that takes other arguments
            pass
    return TrainingError(f"A scheduled function failed with {kind}. Received: {text}")


def _rebuild_tensorflow_error(kind: str, text: str) -> Exception:
    import tensorflow as tf

    found = getattr(tf.errors, kind, None)
    if isinstance(found, type) and issubclass(found, tf.errors.OpError) and found is not tf.errors.OpError:
        made: Exception = found(None, None, text)
        return made
    return TrainingError(f"A scheduled function failed with {kind}. Received: {text}")


class RemoteValue:
    """Result of a scheduled function, once a worker has run it."""

    def __init__(self, fetch: Callable[[int], Any], number: int) -> None:
        self._fetch = fetch
        self._number = number

    def fetch(self) -> Any:
        """Wait for the result, and return it as NumPy arrays; the same in each worker. Raises what the
        function raised."""
        return self._fetch(self._number)

    def get(self) -> Any:
        """Wait for the result, and return it as tensors of the backend."""

        def convert(leaf: Any) -> Any:
            return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf

        return keras.tree.map_structure(convert, self.fetch())


def refuse_remote_values(structure: Any) -> None:
    """Raise InputError if arguments of a scheduled function are results of others."""
    if any(isinstance(leaf, RemoteValue) for leaf in keras.tree.flatten(structure)):
        raise InputError(
            "A scheduled function doesn't take results of others. Received: a RemoteValue as an argument. "
            "Pass what its fetch() returns."
        )


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
"""Seconds between two questions for a function to run, if there is none."""
_SERVER_ERRORS = (ServerLost, ServerMoved, ServerStalled)
"""Errors that aren't the function's."""


class CoordinatedStrategy(Protocol):
    """A strategy, as a coordinator uses it."""

    def coordinate(self) -> tuple[ClosureClient, ServerMarks, Context]:
        """Prepare for functions that one worker runs at a time. Raises TrainingError if it can't be."""

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
        """Return the data that `make` returns, as this worker reads it."""


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
        """Run each function that is new once without effect, if there are several workers.

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
        """Run a function, and report its outcome."""
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


# Variables that functions on several workers add to, such as those of metrics


class SummedVariables:
    """Gives each worker the sum of what all workers have added.

    Variables are counted in the order of their creation, which is the same in each worker. As one vector,
    those that are made later come behind the others.
    """

    def __init__(self) -> None:
        self._variables: list[Any] = []
        #: Value of each variable before any function changed it, by position in the vector.
        self._first = np.zeros(0)
        #: The values when functions began to run.
        self._base = np.zeros(0)
        #: The sums of all workers up to the last join.
        self._sums = np.zeros(0)

    def read(self, variables: Sequence[Any]) -> NDArray[np.float64]:
        """Return the values of all variables, after noting those of `variables` that are new."""
        known = {id(variable) for variable in self._variables}
        for variable in variables:
            if id(variable) not in known:
                self._variables.append(variable)
                # It was made by the function that has just run, or is about to: metrics begin at zero.
                self._first = np.concatenate([self._first, np.zeros(int(np.prod(tuple(variable.shape))))])
        values = [np.asarray(to_numpy(v), np.float64).reshape(-1) for v in self._variables]
        return np.concatenate([np.zeros(0), *values])

    def first_values(self, start: int) -> NDArray[np.float64]:
        """Return the first values of variables from this position on."""
        return self._first[start:]

    def begin(self, variables: Sequence[Any]) -> None:
        """Remember the values at which functions begin."""
        self._base = self.read(variables)

    def end(self) -> None:
        """Go back to the values at which functions began: what this worker added isn't all."""
        self.assign(self._base)

    def load(self, sums: NDArray[np.float64]) -> None:
        """Add what all workers have added since the last call; `sums` are those up to now."""
        size = self._first.size
        now, before = _fit(sums, size), _fit(self._sums, size)
        self.assign(_fit(self._base, size) + now - before)
        self._sums = np.array(sums)

    def assign(self, values: NDArray[np.float64]) -> None:
        """Set all variables; those behind the end of `values` to zero."""
        values, start = _fit(values, self._first.size), 0
        for variable in self._variables:
            size = int(np.prod(tuple(variable.shape)))
            part = values[start : start + size].reshape(tuple(variable.shape))
            variable.assign(part.astype(to_numpy(variable).dtype))
            start += size


def _fit(vector: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return `vector` of this size, with zeros behind what it has."""
    fitted = np.zeros(size)
    count = min(size, vector.size)
    fitted[:count] = vector[:count]
    return fitted


# Refuses assignments that only the worker that runs a scheduled function would see.
#
# With `tf.distribute` all variables of a scope live on servers, so a scheduled function may assign them
# anywhere. Here servers update by the gradients of `strategy.run`, and metrics are summed over workers. Any
# other assignment in a scheduled function would change one worker's copy, so it is an error


_RAW_ASSIGNMENTS = ("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update")


class AssignmentGuard:
    """Refuses assignments while `refusing` is open, but not while `lifted` is.

    `allowed` returns the variables that may be assigned.
    """

    def __init__(self, allowed: Callable[[], Sequence[Any]]) -> None:
        self._allowed = allowed
        self._refuses = False

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse assignments to other variables while open."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._set(True))
            stack.enter_context(_replaced(Variable, "assign", self._check_keras))
            for owner in active_backend().raw_variable_types():
                for name in _RAW_ASSIGNMENTS:
                    if name in vars(owner):
                        stack.enter_context(_replaced(owner, name, self._check_raw))
            yield

    def lifted(self) -> contextlib.AbstractContextManager[None]:
        """Allow assignments while open, as to what `strategy.run` does itself."""
        return self._set(False)

    @contextlib.contextmanager
    def _set(self, refuses: bool) -> Iterator[None]:
        before, self._refuses = self._refuses, refuses
        try:
            yield
        finally:
            self._refuses = before

    def _check_keras(self, variable: Any) -> None:
        if self._refuses and not _may_assign(variable, self._allowed()):
            raise _refusal(f"{variable.path!r}")

    def _check_raw(self, variable: Any) -> None:
        known = (getattr(v, "_value", None) for v in self._allowed())
        if self._refuses and not any(variable is v for v in known) and "seed_generator" not in variable.name:
            raise _refusal(f"the tf.Variable {variable.name!r}")


def _may_assign(variable: Any, allowed: Sequence[Any]) -> bool:
    # A seed generator's state is each process's own.
    return any(variable is v for v in allowed) or "seed_generator" in variable.path


def _refusal(name: str) -> TrainingError:
    return TrainingError(
        "A scheduled function trains by an optimizer of the strategy's scope in strategy.run, and counts by "
        f"metrics that were made in the scope; other assignments would be one worker's own. Received: an "
        f"assignment to {name}. Move it into the function that strategy.run runs, with gradients for "
        "optimizer.apply."
    )


@contextlib.contextmanager
def _replaced(owner: type, name: str, check: Callable[[Any], None]) -> Iterator[None]:
    original = vars(owner)[name]

    @functools.wraps(original)
    def method(variable: Any, *args: Any, **kwargs: Any) -> Any:
        check(variable)
        return original(variable, *args, **kwargs)

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)
